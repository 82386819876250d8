"""The decoding of video files to RGB frames, by index and within limits of size, duration and time. Uses PyAV or
decord.

Called by `messages` and `workers`. Knows nothing of models: the caller decides which frames are read and how they are
resized.
"""

from hydrainfer.processor.video.file import VideoLimits
from hydrainfer.processor.video.frames import Video, VideoBackend, open_video
from hydrainfer.processor.video.source import FrameSize

__all__ = [
    "FrameSize",
    "Video",
    "VideoBackend",
    "VideoLimits",
    "open_video",
]
