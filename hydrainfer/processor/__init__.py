"""Text and pictures to `core.Request`s, token ids back to text: templates, tokenising, image decoding, stop strings.

Called by `server` and the offline API, in threads off the event loop and off the step loop; only `Fetcher`, which
alone touches a network, runs on the event loop. Never schedules, never touches a device.
"""

from hydrainfer.processor.adapter import ImageAdapter, MediaItem, content_key
from hydrainfer.processor.checkpoint import ImageInput, ModelDescription, load_description
from hydrainfer.processor.detokenize import Detokenizer, Piece, StopStrings, TextStream
from hydrainfer.processor.fetch import Fetcher, FetchLimits, Wanted
from hydrainfer.processor.media import SUPPORTED, MediaLimits, Picture, decode_image, read_image_url
from hydrainfer.processor.messages import ChatMessage, ImagePart, TextPart, parse_messages
from hydrainfer.processor.pixels import Pixels, PixelStore
from hydrainfer.processor.preprocess import Preprocessor, Ticket
from hydrainfer.processor.processor import Prepared, Processor, Timing
from hydrainfer.processor.video import VideoLimits
from hydrainfer.processor.video_part import VideoPart, VideoReading
from hydrainfer.processor.vocabulary import Vocabulary
from hydrainfer.processor.workers import MediaWorkers

__all__ = [
    "SUPPORTED",
    "ChatMessage",
    "Detokenizer",
    "FetchLimits",
    "Fetcher",
    "ImageAdapter",
    "ImageInput",
    "ImagePart",
    "MediaItem",
    "MediaLimits",
    "MediaWorkers",
    "ModelDescription",
    "Picture",
    "Piece",
    "PixelStore",
    "Pixels",
    "Prepared",
    "Preprocessor",
    "Processor",
    "StopStrings",
    "TextPart",
    "TextStream",
    "Ticket",
    "Timing",
    "VideoLimits",
    "VideoPart",
    "VideoReading",
    "Vocabulary",
    "Wanted",
    "content_key",
    "decode_image",
    "load_description",
    "parse_messages",
    "read_image_url",
]
