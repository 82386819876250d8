"""Bytes of a video file to RGB frames, by index and within limits of size, duration and time; by PyAV or decord.

Called by `messages`. Knows no model: which frames are read, and how they are resized, the caller decides.
"""

from hydrainfer.processor.video.file import VideoLimits
from hydrainfer.processor.video.frames import Video, VideoBackend, open_video

__all__ = [
    "Video",
    "VideoBackend",
    "VideoLimits",
    "open_video",
]
