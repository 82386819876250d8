"""All options of a server, each with its type, default and help text. Flags, environment and YAML use the same
options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Device = Literal["auto", "cpu", "cuda", "emulated"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8"]
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Workers = Annotated[int, Meta(ge=0, le=64)]
Budget = Count | Literal["auto"]
NotEmpty = Annotated[str, Meta(min_length=1)]
ContextLength = Annotated[int, Meta(ge=8)]
MEASURE_MINUTES = 3.0


def _help(group: str, text: str, **bounds: Any) -> Meta:
    return Meta(title=group, description=text, **bounds)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a server. `None` means `auto`, which is resolved once, into a new object, when the model and the
    device are known."""

    model: Annotated[
        str,
        _help("Model", "Checkpoint directory, GGUF file, name on the Hugging Face hub, or builtin; default: builtin."),
    ]
    revision: Annotated[
        NotEmpty | None, _help("Model", "Branch, tag or commit of a model on the hub; default: its main branch.")
    ] = None
    mmproj: Annotated[
        NotEmpty | None, _help("Model", "GGUF file of the vision tower and projector beside a model that is one.")
    ] = None
    served_model_name: Annotated[
        NotEmpty | None,
        _help("Model", "Names clients use, e.g. mine,gpt-4o; default: the directory's, file's or hub's name."),
    ] = None
    device: Annotated[
        Device,
        _help(
            "Model", "Where to run: cpu, cuda, auto (cuda if there is one), or emulated (no model; see --cost-model)."
        ),
    ] = "auto"
    cost_model: Annotated[
        str | None,
        _help(
            "Model", "File of what each step takes: of an emulated device (configs/costs), or measured, for Planning."
        ),
    ] = None
    dtype: Annotated[
        DType, _help("Model", "float32, bfloat16, float16 or auto (the checkpoint's; on a CPU float32 where faster).")
    ] = "auto"
    quantization: Annotated[
        Quantization,
        _help(
            "Model",
            "int8: the language model's matrices in 8 bits, a scale for each output; --device cpu only. Decode reads a "
            "half or a quarter, logits change a little (docs/models.md).",
        ),
    ] = "none"
    layout: Annotated[
        str,
        _help(
            "Model",
            "Instances and their stages, e.g. 1EPD, 1E1P1D, 1E2PD+1EPD, a file as in configs/layouts, or auto (see "
            "Planning).",
        ),
    ] = "1EPD"
    native_kernels: Annotated[
        bool,
        _help(
            "Model",
            "Compile and use our CPU kernels; without them, torch's operators.",
            extra={"param_decls": ("--native-kernels/--no-native-kernels",)},
        ),
    ] = True
    cuda_graphs: Annotated[
        bool,
        _help(
            "Model",
            "On CUDA, capture decode steps (FlashInfer) and passes of few pictures; replay them.",
            extra={"param_decls": ("--cuda-graphs/--no-cuda-graphs",)},
        ),
    ] = True
    max_model_len: Annotated[
        ContextLength | None,
        _help("Model", "Context length in tokens; default: the model's, or what the KV cache holds."),
    ] = None

    devices: Annotated[
        Count | None, _help("Planning", "For layout auto: how many instances; default: one per GPU.")
    ] = None
    workload: Annotated[
        NotEmpty | None,
        _help("Planning", "What to expect, of configs/workloads or a recording; default: textcaps, or text."),
    ] = None
    slo: Annotated[
        NotEmpty | None,
        _help("Planning", "ttft=8,tpot=0.08 (seconds), or a preset of configs/slo; default: that of the model."),
    ] = None
    measure_minutes: Annotated[
        float, _help("Planning", "Without --cost-model, this machine is measured so long, once.", gt=0)
    ] = MEASURE_MINUTES

    transport: Annotated[
        Literal["auto", "local", "shared-memory", "gloo", "nccl", "cuda-ipc", "tcp"],
        _help("Cluster", "How cache blocks move between instances; auto: the shortest way between each two."),
    ] = "auto"

    host: Annotated[str, _help("Server", "Address to listen on.", min_length=1)] = "127.0.0.1"
    port: Annotated[int, _help("Server", "Port to listen on; 0 picks a free one.", ge=0, le=65535)] = 8000
    api_key: Annotated[NotEmpty | None, _help("Server", "Require this key as a bearer token.")] = None
    tenants: Annotated[
        NotEmpty | None, _help("Server", "File of tenants: their keys and limits (docs/api.md); read again on SIGHUP.")
    ] = None
    allowed_origins: Annotated[
        NotEmpty | None,
        _help("Server", "Whose pages may ask from a browser, e.g. https://chat.example.com; * is all; default: none."),
    ] = None
    proxy_headers: Annotated[
        NotEmpty | None,
        _help(
            "Server",
            "Proxies, as 127.0.0.1,10.0.0.0/8: of requests from there, X-Forwarded-For says in the log whose they are.",
        ),
    ] = None
    unknown_fields: Annotated[
        Literal["refuse", "ignore"],
        _help(
            "Server",
            "Fields of requests under /v1 that the server does not know: refuse, with the nearest that it knows, or "
            "ignore and log each once.",
        ),
    ] = "refuse"
    access_log: Annotated[
        bool,
        _help(
            "Server",
            "A line per request on stderr, without its content.",
            extra={"param_decls": ("--access-log/--no-access-log",)},
        ),
    ] = True
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _help("Server", "What the server and its instances log on stderr."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], _help("Server", "Log lines, those of requests too, as text or as a JSON object each.")
    ] = "text"
    stats_s: Annotated[float, _help("Server", "While there is load, a line about it so often; 0: never.", ge=0)] = 10.0
    metrics_prefix: Annotated[
        str,
        _help(
            "Server",
            "What the names of /metrics begin with; vllm: vLLM's dashboards show this server, too.",
            pattern="^[a-zA-Z_][a-zA-Z0-9_]*$",
            extra={"form": "letters, digits and _, such as vllm"},
        ),
    ] = "hydrainfer"
    otlp_endpoint: Annotated[
        NotEmpty | None,
        _help("Server", "Collector of OpenTelemetry traces (OTLP, HTTP), e.g. http://127.0.0.1:4318; default: none."),
    ] = None
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "hermes",
            "qwen3_coder",
            "llama3_json",
            "pythonic",
            "mistral",
            "mistral_args",
            "functiongemma",
            "harmony",
        ],
        _help("Server", "How the model writes tool calls (docs/api.md); auto: as its template says."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "mistral", "kimi", "harmony"],
        _help("Server", "How the model marks what it thinks: think is <think>; auto: as its template says."),
    ] = "auto"
    chat_template: Annotated[
        NotEmpty | None, _help("Server", "File of a Jinja chat template; default: the checkpoint's.")
    ] = None
    root_path: Annotated[
        str,
        _help(
            "Server",
            "Prefix under which a proxy shows the server, e.g. /hydra; it may strip it or not.",
            pattern="^(/[^/?#]+)*$",
            extra={"form": "a path that begins with / and does not end with it, such as /hydra"},
        ),
    ] = ""
    ssl_certfile: Annotated[
        NotEmpty | None, _help("Server", "TLS certificate (PEM, with its chain): then the server speaks https only.")
    ] = None
    ssl_keyfile: Annotated[NotEmpty | None, _help("Server", "Its key; default: in the same file.")] = None
    ssl_ca_certs: Annotated[
        NotEmpty | None,
        _help("Server", "Certificates (PEM) of which one must have signed the client's; default: none."),
    ] = None
    request_timeout_s: Annotated[float, _help("Server", "A request ends with 504 after this long.", gt=0)] = 600.0
    drain_s: Annotated[
        float, _help("Server", "After SIGTERM, new requests get 503, and those that run this long to finish.", ge=0)
    ] = 25.0
    stall_s: Annotated[
        float,
        _help(
            "Server",
            "/health says 503 when work stands still this long; an instance (of several) whose batch does is killed.",
            gt=0,
        ),
    ] = 120.0
    start_timeout_s: Annotated[
        float, _help("Server", "Give up when the instances have not started after this long.", gt=0)
    ] = 600.0
    max_queue_s: Annotated[
        Positive | None,
        _help(
            "Server",
            "Seconds of work that may wait for its first token, then 429; default: 10, or the TTFT given with --slo.",
        ),
    ] = None
    max_waiting: Annotated[
        int, _help("Server", "Requests in the system, whatever their work, before new ones get 429.", ge=1)
    ] = 4096

    launcher: Annotated[
        Literal["auto", "inproc", "ray"],
        _help("Cluster", "Instances are threads of the server (inproc) or Ray actors; auto: ray for several."),
    ] = "auto"
    ray_address: Annotated[
        NotEmpty | None, _help("Cluster", "Ray cluster to join, e.g. 10.0.0.1:6379; default: one of our own, here.")
    ] = None
    cluster_host: Annotated[
        NotEmpty | None,
        _help("Cluster", "IP at which instances on other machines reach this server; default: this machine only."),
    ] = None
    cpu_share: Annotated[
        Positive | None, _help("Cluster", "CPUs of a Ray node per instance; default: 1, or less if there are fewer.")
    ] = None
    gpu_share: Annotated[float, _help("Cluster", "Part of a GPU per instance; 0.5 puts two on each.", gt=0, le=1)] = 1.0
    balancing: Annotated[
        Literal["least_load", "round_robin", "random"],
        _help("Cluster", "How a request chooses among instances: least_load, round_robin or random."),
    ] = "least_load"

    token_budget: Annotated[
        Budget, _help("Scheduler", "Language tokens per batch; auto: as the SLO allows (see Planning).")
    ] = 2048
    image_budget: Annotated[Budget, _help("Scheduler", "Pictures per vision batch; auto likewise.")] = 4
    image_token_budget: Annotated[
        int, _help("Scheduler", "Embeddings per vision batch; a larger picture is encoded alone.", ge=1)
    ] = 16_384
    step_s: Annotated[
        float, _help("Scheduler", "A batch takes about this long at most: chunks shrink, fewer pictures.", gt=0)
    ] = 0.5
    max_running: Annotated[int, _help("Scheduler", "Requests that hold cache at once.", ge=1)] = 96
    order: Annotated[
        Literal["rank", "fcfs"],
        _help(
            "Scheduler",
            "rank: little work left goes first, and waiting counts; fcfs: first come, first served; a prompt that has "
            "begun is finished first.",
        ),
    ] = "rank"
    encode_gate: Annotated[
        Literal["paper", "aged"], _help("Scheduler", "When encode may start beside a running prefill.")
    ] = "aged"
    encode_wait_s: Annotated[
        float, _help("Scheduler", "With encode_gate=aged: a picture waits at most this long.", ge=0)
    ] = 0.5
    batching: Annotated[
        Literal["stage-level", "prefill-first"],
        _help("Scheduler", "prefill-first: nobody decodes while there is something to prefill; for comparisons only."),
    ] = "stage-level"
    headroom_tokens: Annotated[
        int, _help("Scheduler", "KV tokens reserved beyond prompt and answer so far, before a lease has to grow.", ge=0)
    ] = 32
    overlap: Annotated[
        Literal["auto", "free", "step", "off", "slice"],
        _help(
            "Scheduler",
            "Vision and language side by side: free, joined at each step, off, or in slices between which tokens "
            "are made; auto: on a CPU off, with --slo slice; on CUDA free.",
        ),
    ] = "auto"
    async_scheduling: Annotated[
        bool | None,
        _help(
            "Scheduler",
            "Launch a step while one of decodes alone is computed, before its tokens are known; default: on CUDA.",
            extra={"param_decls": ("--async-scheduling/--no-async-scheduling",)},
        ),
    ] = None
    drafts: Annotated[
        str,
        _help(
            "Scheduler",
            "Who guesses tokens that the next step verifies, which changes no token: grammar (what it forces), "
            "prediction (the request's), ngram (the text itself), mtp (the model's layer for it) and model "
            "(--draft-model), with commas; off; or auto (all that there are, on a CPU).",
            min_length=1,
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        _help(
            "Scheduler",
            "A smaller model of the same vocabulary that guesses, named as for --model; or self-int8: the model's own "
            "weights in 8 bits (on a CPU).",
        ),
    ] = None
    max_drafts: Annotated[int, _help("Scheduler", "Drafts of a sequence in one step.", ge=1, le=63)] = 7
    threads: Annotated[
        Count | None, _help("Scheduler", "At most so many CPU threads compute a batch; default: all cores.")
    ] = None

    kv_cache_gib: Annotated[
        Positive | None, _help("Memory", "KV cache size of an instance; default: from free memory and max_running.")
    ] = None
    image_cache_gib: Annotated[
        Positive | None, _help("Memory", "Image embedding cache size of an instance; default: 64 pictures.")
    ] = None
    host_cache_gib: Annotated[
        float,
        _help(
            "Memory",
            "Host memory of an instance. It keeps prefixes after the device has evicted them, and requests that find "
            "no room in the KV cache of an instance that decodes: they leave the prefill instance and wait there. On a "
            "CPU it is the same memory as the KV cache's.",
            ge=0,
        ),
    ] = 0.0
    store: Annotated[
        str | None,
        _help(
            "Memory",
            "Where what was computed outlives eviction and restarts, shared by all instances and servers that name it: "
            "dir:/path?gib=50, redis://host:6379, or several, with commas. The password of a server comes from "
            "HYDRAINFER_STORE_PASSWORD.",
        ),
    ] = None
    elastic_memory: Annotated[
        bool,
        _help(
            "Memory",
            "Caches of tokens, windows and states lend each other memory, as requests turn out long or many.",
            extra={"param_decls": ("--elastic-memory/--no-elastic-memory",)},
        ),
    ] = True
    prefix_cache: Annotated[
        bool,
        _help(
            "Memory",
            "Requests that begin alike share the KV of what they have in common.",
            extra={"param_decls": ("--prefix-cache/--no-prefix-cache",)},
        ),
    ] = True
    block_tokens: Annotated[int, _help("Memory", "Tokens per KV block.", ge=1, le=256)] = 16
    gpu_memory_fraction: Annotated[float, _help("Memory", "Share of the GPU for weights and caches.", gt=0, le=1)] = 0.9

    max_images: Annotated[int, _help("Limits", "Pictures per request.", ge=0)] = 16
    max_image_pixels: Annotated[int, _help("Limits", "Pixels per picture, checked before decoding.", ge=1)] = 89_478_485
    max_body_mib: Annotated[float, _help("Limits", "Size of a request's body.", gt=0)] = 64.0
    media_hosts: Annotated[
        Literal["public", "any", "none"],
        _help("Media", "http(s) URLs at public addresses, at private ones too (any), or none."),
    ] = "public"
    media_domains: Annotated[
        NotEmpty | None,
        _help("Media", "Only these hosts, e.g. images.example.com,*.example.org; default: every host."),
    ] = None
    media_roots: Annotated[
        NotEmpty | None, _help("Media", "Directories whose files file: URLs may name, e.g. /data,/srv; default: none.")
    ] = None
    image_fetch_s: Annotated[float, _help("Media", "A picture must have come after this long.", gt=0)] = 5.0
    max_image_mib: Annotated[float, _help("Media", "Size of a picture's file.", gt=0)] = 32.0
    max_videos: Annotated[int, _help("Media", "Videos per request.", ge=0)] = 2
    max_video_frames: Annotated[int, _help("Media", "Frames of a request's videos that the model sees.", ge=2)] = 768
    max_video_s: Annotated[float, _help("Media", "A video lasts at most this long.", gt=0)] = 3600.0
    max_video_mib: Annotated[float, _help("Media", "Size of a video's file.", gt=0)] = 256.0
    video_fetch_s: Annotated[float, _help("Media", "A video must have come after this long.", gt=0)] = 30.0
    video_threads: Annotated[int, _help("Media", "Threads that decode one video.", ge=1)] = 2
    video_backend: Annotated[
        Literal["auto", "pyav", "decord"],
        _help("Media", "pyav (auto), or decord (an extra) for files that are trusted."),
    ] = "auto"
    fetches: Annotated[int, _help("Media", "Downloads at once; more wait.", ge=1)] = 32
    fetch_memory_mib: Annotated[float, _help("Media", "Downloads held at once until decoded; beyond it 429.", gt=0)] = (
        512.0
    )
    pixel_memory_mib: Annotated[float, _help("Limits", "Decoded pictures held at once; beyond it 429.", gt=0)] = 512.0
    preprocess_threads: Annotated[int, _help("Limits", "Threads that decode pictures and tokenise.", ge=1)] = 2
    image_backend: Annotated[
        Literal["auto", "torchvision", "pillow", "dali"],
        _help(
            "Media",
            "Whose pixels a model sees. torchvision (auto): what transformers, vLLM and SGLang show it, without "
            "torchvision; pillow: Pillow's, as before; dali (an extra): JPEGs on the GPU, not the reference's pixels.",
        ),
    ] = "auto"
    media_workers: Annotated[
        Workers | None,
        _help("Media", "Processes that decode pictures; 0: threads of the server do; default: one per core, up to 4."),
    ] = None
    media_timeout_s: Annotated[
        float, _help("Media", "A picture that takes a worker longer ends with 504, and the worker with it.", gt=0)
    ] = 30.0
    fast_jpeg: Annotated[
        bool,
        _help(
            "Media",
            "Decode large JPEGs at 1/2 to 1/8 of their size where the model wants no more: faster, but the pixels are "
            "not the reference's.",
            extra={"param_decls": ("--fast-jpeg/--no-fast-jpeg",)},
        ),
    ] = False
    media_memory_mib: Annotated[
        float, _help("Media", "Of pixel_memory_mib: may stay filled with pictures of ended requests.", ge=0)
    ] = 64.0
