"""What a checkpoint's folder says of itself, and whether it fits what it is to be loaded into. Pure."""

from __future__ import annotations

import dataclasses

import msgspec

from actors.contract import AdapterConfig, FullConfig, TenantConfig
from actors.models.spec import ModelSpec
from bus.errors import newer_format
from bus.events import LoraConfig
from bus.tables import CheckpointKind

FORMAT = 1
"""Written into every manifest. Readers accept this one and all older ones."""
FILE = "tinkerbus.json"


class BaseModel(msgspec.Struct, frozen=True, kw_only=True):
    """Which model weights belong to: the same under either name with the same shape, or with the same files."""

    name: str
    """It was served under."""
    files: str
    """A hash of its config and of its files' names and sizes."""
    shape: dict[str, object]
    """Everything that the sizes of its tensors follow from."""

    def same(self, other: BaseModel) -> bool:
        return self.shape == other.shape and (self.name == other.name or self.files == other.files)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing in it differs between a run and its replay."""

    model_id: str
    seq_id: int
    """Of the operation that saved it."""
    kind: CheckpointKind
    name: str | None
    """None for weights of one sampling session."""
    base: BaseModel
    adapter: AdapterConfig | None
    """None for a model that trained every parameter."""
    optimizer: bool
    sizes: dict[str, int] = {}
    """Bytes of each file beside this one."""
    format: int = FORMAT

    @property
    def config(self) -> TenantConfig:
        return self.adapter or FullConfig()


def decode(text: bytes) -> Manifest:
    """Raises NewerFormat, ValueError."""
    number = msgspec.json.decode(text, type=dict[str, object]).get("format")
    if isinstance(number, int) and number > FORMAT:
        raise newer_format(number, FORMAT)
    return msgspec.json.decode(text, type=Manifest)


def shape(spec: ModelSpec) -> dict[str, object]:
    """Of a model, as JSON has it; how long its context may be is no matter of its weights."""
    facts: dict[str, object] = msgspec.json.decode(msgspec.json.encode(dataclasses.asdict(spec)))
    del facts["context_length"]
    return facts


def adapter(config: TenantConfig) -> AdapterConfig | None:
    """None for a model that trains every parameter."""
    return config if isinstance(config, AdapterConfig) else None


def lora(config: TenantConfig) -> LoraConfig | None:
    """As tables and results say it."""
    if not isinstance(config, AdapterConfig):
        return None
    return LoraConfig(
        rank=config.rank,
        seed=config.seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
    )


def misfit(saved: TenantConfig, model: TenantConfig) -> str | None:
    """Why a model cannot take over a checkpoint's weights; None where it can. Seeds may differ: nothing is drawn."""
    if isinstance(saved, AdapterConfig) and isinstance(model, AdapterConfig):
        fields = ("rank", "alpha", "train_attn", "train_mlp", "train_unembed")
        for name in fields:
            theirs, ours = getattr(saved, name), getattr(model, name)
            if theirs != ours:
                return f"the checkpoint was trained with lora {name} {theirs}, and the model has {ours}"
        return None
    if type(saved) is type(model):
        return None
    kinds = ["a LoRA adapter" if isinstance(c, AdapterConfig) else "every parameter" for c in (saved, model)]
    return f"the checkpoint holds {kinds[0]}, and the model trains {kinds[1]}"
