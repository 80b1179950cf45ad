"""How a group's ranks are laid out over data, tensor, pipeline and expert parallelism, refused here or right. Pure.

Ranks are numbered as Megatron numbers them: tensor-parallel neighbours first, then data-parallel ones, pipeline
stages last. Experts are never split over tensor-parallel ranks; those take whole experts instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.models.spec import ModelSpec


class LayoutError(ValueError):
    """A layout that cannot work; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes of one group. The world's size is dp · tp · pp; ep splits the experts over part of it."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1
    """Model chunks on each pipeline stage; more than 1 interleaves them."""
    ep: int = 1
    """Ranks that share out the experts of a mixture-of-experts layer, taken from the tp · dp ranks of a stage."""
    cp: int = 1
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks along the sequence."""
    distributed_optimizer: bool = False
    """Shard gradients after the reduce-scatter, and the optimizer's state, over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce the gradient in buckets that are all on their way at once."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "virtual_pp", "ep", "cp"):
            size = getattr(self, name)
            if size < 1:
                raise LayoutError(f"layout.{name} is {size}; it must be at least 1")
        if self.cp > 1:
            raise LayoutError(
                f"layout.cp is {self.cp}, but context parallelism needs Transformer Engine's attention; "
                "Megatron's local attention sees one whole sequence on each rank"
            )
        if self.virtual_pp > 1 and self.pp == 1:
            raise LayoutError(
                f"layout.virtual_pp is {self.virtual_pp}, but chunks interleave over pipeline stages and layout.pp is 1"
            )
        if self.sequence_parallel and self.tp == 1:
            raise LayoutError(
                "layout.sequence_parallel splits over tensor-parallel ranks, but layout.tp is 1"
            )
        stage = self.tp * self.dp
        if stage % self.ep or (self.ep % self.tp and self.tp % self.ep):
            raise LayoutError(
                f"layout.ep is {self.ep}; it must divide the tp · dp = {stage} ranks of a stage, "
                f"and divide tp = {self.tp} or be a multiple of it"
            )

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def chunks(self) -> int:
        """Parts that the layers are cut into."""
        return self.pp * self.virtual_pp

    @property
    def lockstep(self) -> int:
        """Neighbouring data-parallel ranks whose experts serve each other: they run their microbatches together."""
        return max(1, self.ep // self.tp)

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding, so that every tensor-parallel rank has as many."""
        return -(-vocab_size // self.tp) * self.tp

    def check(self, spec: ModelSpec) -> None:
        """Raises LayoutError where this model cannot be laid out like this."""
        for what, size in (
            ("attention heads", spec.num_attention_heads),
            ("key/value heads", spec.num_query_groups),
            ("MLP columns", self.tp if spec.moe else spec.ffn_hidden_size),
        ):
            if size % self.tp:
                raise LayoutError(f"layout.tp is {self.tp}, which does not divide the model's {size} {what}")
        if spec.num_layers % self.chunks:
            stages = f"layout.pp · layout.virtual_pp is {self.pp} · {self.virtual_pp} = {self.chunks}"
            raise LayoutError(f"{stages}, which does not divide the model's {spec.num_layers} layers")
        if spec.moe is None:
            if self.ep > 1:
                raise LayoutError(f"layout.ep is {self.ep}, but the model has no experts")
            return
        if spec.moe.num_experts % self.ep:
            raise LayoutError(
                f"layout.ep is {self.ep}, which does not divide the model's {spec.moe.num_experts} experts"
            )
        if self.tp > 1 and not self.sequence_parallel:
            raise LayoutError(
                f"layout.tp is {self.tp} for a model with experts, which needs layout.sequence_parallel = true"
            )
