"""Pictures decoded, resized and made into the pixel arrays that a model takes. There is one adapter per model family;
those of the Qwen families also prepare the frames of videos. `PixelStore` holds the results.

Called by `messages`, `text` and `workers`. Never fetches a URL, never starts a process.
"""

from hydrainfer.processor.pictures.adapter import (
    Counting,
    ImageAdapter,
    InnerText,
    MediaItem,
    VideoAdapter,
    VideoShape,
    content_key,
    frames_key,
    image_adapter,
    video_adapter,
)
from hydrainfer.processor.pictures.clip import ClipImages
from hydrainfer.processor.pictures.media import (
    MediaLimits,
    Picture,
    ResizeTarget,
    agrees,
    decode_image,
    from_image,
    header_pixels,
    read_data_url,
    read_image_url,
    silence_pillow,
)
from hydrainfer.processor.pictures.pixels import Pixels, PixelStore

__all__ = [
    "ClipImages",
    "Counting",
    "ImageAdapter",
    "InnerText",
    "MediaItem",
    "MediaLimits",
    "Picture",
    "PixelStore",
    "Pixels",
    "ResizeTarget",
    "VideoAdapter",
    "VideoShape",
    "agrees",
    "content_key",
    "decode_image",
    "frames_key",
    "from_image",
    "header_pixels",
    "image_adapter",
    "read_data_url",
    "read_image_url",
    "silence_pillow",
    "video_adapter",
]
