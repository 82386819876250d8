"""The preparation of requests: text and pictures become `core.Request`s, and token ids become text again. Covers chat
templates, tokenising, image decoding and stop strings.

Called by `server` and the offline API, in threads other than those of the event loop and the step loop. `Fetcher`, the
only part that touches a network, has an event loop of its own. Never schedules, never touches a device.
"""

from hydrainfer.processor.fetching import Fetcher, FetchLimits, Wanted
from hydrainfer.processor.messages import (
    ChatMessage,
    ImagePart,
    PythonPrompt,
    TextPart,
    Tools,
    VideoReading,
    parse_messages,
    parse_prompts,
    parse_tools,
    read_arguments,
)
from hydrainfer.processor.pictures import (
    ClipImages,
    ImageAdapter,
    MediaItem,
    MediaLimits,
    Picture,
    Pixels,
    PixelStore,
    agrees,
    decode_image,
    image_adapter,
)
from hydrainfer.processor.processor import ChatOptions, Prepared, Processor, RequestTerms
from hydrainfer.processor.text import (
    FORMATS,
    AnswerPiece,
    AnswerStream,
    CallDelta,
    Detokenizer,
    ModelDescription,
    TextStream,
    ToolFormat,
    Vocabulary,
    answer_stream,
    calls_grammar,
    encode,
    encode_rendered,
    load_description,
    together,
)
from hydrainfer.processor.video import VideoLimits, open_video
from hydrainfer.processor.workers import Encodable, JobTicket, MediaWorkers, Seal, prepare_image

__all__ = [
    "FORMATS",
    "AnswerPiece",
    "AnswerStream",
    "CallDelta",
    "ChatMessage",
    "ChatOptions",
    "ClipImages",
    "Detokenizer",
    "Encodable",
    "FetchLimits",
    "Fetcher",
    "ImageAdapter",
    "ImagePart",
    "JobTicket",
    "MediaItem",
    "MediaLimits",
    "MediaWorkers",
    "ModelDescription",
    "Picture",
    "PixelStore",
    "Pixels",
    "Prepared",
    "Processor",
    "PythonPrompt",
    "RequestTerms",
    "Seal",
    "TextPart",
    "TextStream",
    "ToolFormat",
    "Tools",
    "VideoLimits",
    "VideoReading",
    "Vocabulary",
    "Wanted",
    "agrees",
    "answer_stream",
    "calls_grammar",
    "decode_image",
    "encode",
    "encode_rendered",
    "image_adapter",
    "load_description",
    "open_video",
    "parse_messages",
    "parse_prompts",
    "parse_tools",
    "prepare_image",
    "read_arguments",
    "together",
]
