"""The service's settings, typed: defaults, then a TOML file, the environment and the command line.

Every setting is frozen, picklable and has a default. A key that does not exist is refused by name; a bad
value is refused with its field, the value and what would be right. Nothing is silently ignored.

The environment spells a field `TINKERBUS_<SECTION>__<KEY>` (`TINKERBUS_HTTP__PORT=8001`) or, at the top
level, `TINKERBUS_<KEY>` (`TINKERBUS_MODEL=tiny`). Tables and lists are written there as JSON.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bus.broker_config import SERVER_USER
from runtime.settings_reader import SettingsError, read_environment, read_struct, read_toml

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Secret = Annotated[str, Meta(min_length=1)]
Seconds = Annotated[float, Meta(gt=0)]

KEY_PREFIX = "tml-"
"""The SDK refuses any other key before it sends a request."""

DEFAULT_TENANT = "default"


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table of the settings."""


class Http(Section, frozen=True):
    """Where SDK clients connect."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens the service to the network."""
    port: Port = 8000
    """0 takes any free one."""
    replicas: Count = 1
    """Ingress processes. They share nothing but the broker."""
    long_poll_s: Annotated[float, Meta(gt=0, le=40)] = 25.0
    """How long `retrieve_future` holds a poll before it answers "try again". The SDK gives up after 45 s."""
    max_body_bytes: Count = 64 * 1024 * 1024
    """Largest request body, after decompression. Longer ones are not read to the end."""


class Client(Section, frozen=True):
    """What `client/config` tells the SDK."""

    fwdbwd_max_chunk_len: Count = 1024
    """Datums per forward_backward request; the SDK splits longer calls."""
    fwdbwd_max_chunk_bytes_count: Count = 5_000_000
    """Bytes per forward_backward request; lowered to what the broker takes in one message."""
    parallel_fwdbwd_chunks: bool = True
    """False makes the SDK post the chunks of one call one after the other."""
    proto_compress_fwdbwd: bool = False
    """True makes the SDK send forward_backward bodies zstd-compressed."""
    use_pyqwest_transport: bool = True
    """False switches the SDK to plain httpx."""


class Nats(Section, frozen=True):
    """The broker. Without a URL the service starts an embedded one in its data folder."""

    url: str | None = None
    """`nats://host:4222`; None for the embedded broker."""
    user: str | None = None
    """User of the servers; tenants have their own."""
    password: str | None = None
    """Password of `user`."""
    port: Port = 0
    """Of the embedded broker; 0 takes any free one, another one at every start."""

    def __repr__(self) -> str:
        return (
            f"Nats(url={self.url!r}, user={self.user!r}, password={_hidden(self.password)}, port={self.port})"
        )


class Layout(Section, frozen=True):
    """How the group's ranks split the work. ranks = dp * tp * pp."""

    dp: Count = 1
    """Data-parallel replicas."""
    tp: Count = 1
    """Tensor-parallel ranks."""
    pp: Count = 1
    """Pipeline stages."""
    virtual_pp: Count = 1
    """Model chunks on each pipeline stage; more than 1 interleaves them."""
    ep: Count = 1
    """Ranks that share out a model's experts, taken from the tp * dp ranks of a stage."""
    cp: Count = 1
    """Context-parallel ranks; this release has 1."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks along the sequence."""
    distributed_optimizer: bool = False
    """Shard gradients and optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce the gradient in buckets that are all on their way at once."""
    threads_per_rank: CountOrZero = 0
    """CPU threads of one rank; 0 shares the machine's cores out. Other counts give other last bits."""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def threads(self, cores: int | None = None) -> int:
        """Threads of one rank on a machine with `cores` cores (this one's by default); at least 1."""
        if self.threads_per_rank:
            return self.threads_per_rank
        return max(1, (cores or os.cpu_count() or 1) // self.ranks)


class Packing(Section, frozen=True):
    """How one request is split into microbatches; never a matter of what else is queued."""

    max_tokens_per_microbatch: Count = 8192
    """Padded tokens in one microbatch. A single longer datum goes alone."""
    max_datums_per_microbatch: CountOrZero = 0
    """Datums in one microbatch; 0 for no limit."""


class Head(Section, frozen=True):
    """The LM head."""

    fused: bool = False
    """Compute logprobs from logits in chunks, never whole: less memory for large vocabularies, some more time."""


class FakeInt4(Section, frozen=True):
    """Weights rounded to the values that an INT4 deployment of the model will have, in every pass."""

    convention: Literal["off", "rtn", "kimi"] = "off"
    """How a group's scale and limits are chosen; "off" leaves the weights as they are."""
    modules: tuple[str, ...] = ("model.layers.*.mlp.experts.*",)
    """Patterns of Hugging Face module names; `*` also crosses dots. By default the experts of MoE layers."""
    group_size: Count = 32
    """Neighbouring input features that share a scale."""


class Lora(Section, frozen=True):
    """What adapters of this server have in common."""

    alpha: Annotated[float, Meta(gt=0)] = 32.0
    """Scaling is alpha / rank; the Tinker API has no field for it."""
    max_rank: Count = 128
    """Largest rank a model may ask for."""


class Limits(Section, frozen=True):
    """What a request may ask for, and how much may wait.

    A request past a `max_datum…` or `max_datums…` limit fails alone, and says which. One that finds too much waiting
    for its result is not accepted now: HTTP answers 429, and a publish stays in the model's queue, which the broker
    closes when it is full. The number whose turn it is always gets in.
    """

    max_datum_tokens: CountOrZero = 0
    """Tokens in one datum; 0 for the base model's context length."""
    max_datums_per_request: CountOrZero = 0
    """Datums in one forward_backward; 0 for no limit."""
    max_datum_bytes: CountOrZero = 32 * 1024**2
    """Bytes of one datum as it is sent; 0 for no limit but `http.max_body_bytes`. What the broker cannot carry in one
    message is stored apart from the log."""
    max_resident_models: CountOrZero = 0
    """Models in the ranks' memory; the one used longest ago is put away on disk and comes back with the same bits.
    0 for no limit."""
    max_model_ops: CountOrZero = 1024
    """Operations of one model that have no result yet; 0 for no limit."""
    max_model_bytes: CountOrZero = 256 * 1024**2
    """Bytes of them; 0 for no limit."""
    max_group_ops: CountOrZero = 8192
    """Operations of all models that have no result yet; 0 for no limit."""
    max_group_bytes: CountOrZero = 2 * 1024**3
    """Bytes of them; 0 for no limit."""
    max_model_submissions: Count = 1024
    """Messages in one model's submit queue, which event clients publish to."""


class Recovery(Section, frozen=True):
    """How the service comes back after a crash: newest snapshots, then the log behind them."""

    replay_budget_s: Seconds = 60.0
    """Work on the ranks, in seconds, that a recovery may have to repeat; a snapshot is taken when it would be more."""
    tries: Count = 2
    """How often an operation that runs alone may take the ranks down before it is given up, with category server."""
    lease_s: Seconds = 5.0
    """A dispatcher that has not renewed its lease for so long may be replaced by another one."""
    standby_dispatchers: CountOrZero = 1
    """Dispatchers that wait, with everything imported, for the one that acts to let its lease run out."""
    heartbeat_timeout_s: Seconds = 10.0
    """A rank that gives no sign of life for so long counts as dead; its group is killed and built anew."""
    accept_new_bits: bool = False
    """Go on from snapshots that another torch, processor, packing or model made: the bits will differ from then on."""


class Checkpoints(Section, frozen=True):
    """Where saved weights go."""

    url: str = ""
    """An fsspec URL, as `s3://bucket/folder`, that every process of the service reaches; empty for `checkpoints` in the
    data folder."""


class Sampler(Section, frozen=True):
    """Sampling, in processes of its own beside the training ranks."""

    replicas: CountOrZero = 1
    """Sampler processes; 0 for a service that only trains."""
    threads: Count = 1
    """CPU threads of each."""
    max_running: Count = 64
    """Sequences that are generated at a time, in one batch."""
    max_waiting: Count = 4096
    """Requests that wait for their turn; one more gets 429."""
    max_samplers: Count = 16
    """Samplers whose weights are in memory; the one used longest ago makes room."""


class Sessions(Section, frozen=True):
    """What SDK clients open, and keep alive with a heartbeat every 10 s."""

    expire_after_s: Annotated[float, Meta(ge=0)] = 600.0
    """A session without heartbeats for so long ends and frees its models and samplers, unless work is in flight;
    counted while the service is up. 0 for never."""


class Results(Section, frozen=True):
    """How long answers stay readable; after that a poll for them gets 410."""

    ttl_s: Seconds = 86400.0
    """Age at which a result goes."""
    max_bytes: Count = 8 * 1024**3
    """Size of all results at which the oldest go."""


class Tenant(Section, frozen=True):
    """One user of the service: the owner of sessions, models and results."""

    api_keys: tuple[str, ...] = ()
    """Keys the SDK sends; they start with `tml-`. Without any, one is made and kept in the data folder."""
    nats_password: Secret | None = None
    """Password of the tenant's NATS user; without it one is made and kept in the data folder."""

    def __repr__(self) -> str:
        return f"Tenant(api_keys=<{len(self.api_keys)}>, nats_password={_hidden(self.nats_password)})"


class Debug(Section, frozen=True):
    """For looking inside. All of it is off by default."""

    dump_gradients: str = ""
    """Folder that gets every finalized gradient before clipping, as safetensors; empty for none."""


class Settings(Section, frozen=True):
    """All of it."""

    data: str = "./tinkerbus-data"
    """Folder of the log, snapshots, keys and built models. Started again on it, the service goes on."""
    model: str = "tiny"
    """Folder of a Hugging Face model, or "tiny" for the built-in one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the base model's weights and activations. Adapters, gradients and optimizers are float32 with either."""
    model_name: str | None = None
    """Name clients ask for; None for the folder's name."""
    gap_timeout_s: Seconds = 600.0
    """How long a missing seq_id is waited for, counted from the model's last accepted operation."""
    http: Http = Http()
    client: Client = Client()
    nats: Nats = Nats()
    layout: Layout = Layout()
    packing: Packing = Packing()
    head: Head = Head()
    fake_int4: FakeInt4 = FakeInt4()
    lora: Lora = Lora()
    limits: Limits = Limits()
    recovery: Recovery = Recovery()
    results: Results = Results()
    checkpoints: Checkpoints = Checkpoints()
    sampler: Sampler = Sampler()
    sessions: Sessions = Sessions()
    tenants: dict[str, Tenant] = {}
    """By name. Empty for one tenant called "default"."""
    debug: Debug = Debug()

    @property
    def served_name(self) -> str:
        """The name of the base model on the wire."""
        return self.model_name or ("tiny" if self.model == "tiny" else Path(self.model).resolve().name)

    @property
    def tenant_names(self) -> tuple[str, ...]:
        return tuple(self.tenants) or (DEFAULT_TENANT,)


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """The settings of this start: field by field, `overrides` (dotted names) beat `environment` beats `file`.

    Raises SettingsError with one line that names the source, the field, the value and what would be right.
    """
    raw: dict[str, Any] = {}
    if file is not None:
        raw = read_toml(file)
        read_struct(Settings, raw, str(file))
    merge(raw, read_environment(Settings, os.environ if environment is None else environment))
    given: dict[str, Any] = {}
    for dotted, value in (overrides or {}).items():
        merge(given, _nested(dotted, value))
    read_struct(Settings, given, "command line")
    merge(raw, given)
    settings = read_struct(Settings, raw, "settings")
    check(settings)
    return settings


def stream_limits(settings: Settings) -> dict[str, Any]:
    """What the broker's streams are to keep: the arguments of `bus.streams.ensure_streams`."""
    return {
        "results_ttl_s": settings.results.ttl_s,
        "results_max_bytes": settings.results.max_bytes,
        "submit_max_msgs_per_model": settings.limits.max_model_submissions,
    }


def merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Lay `other` over `into`, table by table."""
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def check(settings: Settings) -> None:
    """What no single field can say. Raises SettingsError."""
    owner: dict[str, str] = {}
    for tenant, row in settings.tenants.items():
        if not tenant:
            raise SettingsError("tenants has an entry with an empty name: a tenant needs a name")
        if tenant == SERVER_USER:
            raise SettingsError(f"tenants.{tenant}: this name is the servers' own broker user")
        for place, key in enumerate(row.api_keys):
            field = f"tenants.{tenant}.api_keys[{place}]"
            if not _sdk_sends(key):
                raise SettingsError(
                    f"{field} does not start with {KEY_PREFIX!r} and go on in printable ASCII: "
                    "the SDK sends no other keys"
                )
            if owner.setdefault(key, tenant) != tenant:
                raise SettingsError(f"{field} is a key of tenants.{owner[key]} too: a key has one tenant")


def _sdk_sends(key: str) -> bool:
    return key.startswith(KEY_PREFIX) and key != KEY_PREFIX and key.isascii() and key.isprintable()


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    """`a.b` and 1 as {"a": {"b": 1}}."""
    head, _, rest = dotted.partition(".")
    return {head: _nested(rest, value) if rest else value}


def _hidden(secret: str | None) -> str:
    return "None" if secret is None else "'***'"
