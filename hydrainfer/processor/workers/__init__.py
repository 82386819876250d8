"""The preparation of a request's pictures and videos: recalled from earlier requests, done by worker processes, or done
in the calling thread.

Called by `Processor`. A worker runs `worker.main`, shares no memory with the server, and answers with arrays and error
messages. Never reads text, never fetches.
"""

from hydrainfer.processor.workers.pool import MediaWorkers
from hydrainfer.processor.workers.prepare import Encodable, Seal, prepare_image
from hydrainfer.processor.workers.preprocess import Adapters, JobTicket, Preprocessor

__all__ = [
    "Adapters",
    "Encodable",
    "JobTicket",
    "MediaWorkers",
    "Preprocessor",
    "Seal",
    "prepare_image",
]
