"""The text causal LM of GLM-5.3-Flash: transformers' backbone with its modules replaced, and a head with the tiled loss.

transformers 5.24 has the backbone (`Glm5NextTextModel`) and no text-only causal LM. Parameters stand where they stand there,
so published weights load by `from_pretrained` and `save_pretrained` writes the published names again.

A replaced module keeps its parameters and only changes its class: `replacements()` is the one list of them. A module that is
not in it stays transformers' own, which is right wherever it treats each token by itself.

Symbols: B rows, L local tokens, M residual streams (`hc_mult`), D hidden size.
"""

from __future__ import annotations

import inspect
import re

import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.glm5_next import modeling_glm5_next as plain

from upipe import preflight
from upipe.glm import conv, delta, kda, moe, sparse
from upipe.glm.config import GlmSettings, GlmTextConfig, check_config
from upipe.glm.context import TokenLayout
from upipe.glm.hyper import HyperConnection
from upipe.glm.indexer import PooledIndexer, selection_contexts
from upipe.glm.kda import KimiDeltaAttention
from upipe.glm.moe import MixtureOfExperts
from upipe.glm.sparse import GlmRuntime, SparseAttention
from upipe.loss import IGNORE, LOSS_TILE_TOKENS, tiled_loss_sum
from upipe.preflight import PreflightError


class DecoderLayer(plain.Glm5NextTextDecoderLayer):
    """`Glm5NextTextDecoderLayer` that hands the batch's layout to attention of both kinds."""

    def forward(self, hidden_states: torch.Tensor, layout: TokenLayout, prev_topk_indices: torch.Tensor | None = None):
        """[B, L, M, D] -> [B, L, M, D], and the selection for a next layer that shares it, or None."""
        streams, pools = hidden_states, None
        post, comb, x = self.attn_hc(streams)
        x = self.input_layernorm(x)
        if self.block_type != "linear_attention":  # the other kind's name changed between transformers 5.17 and 5.24
            x, _, pools = self.self_attn(x, layout=layout, prev_topk_indices=prev_topk_indices)
        else:
            x = self.self_attn(x, layout=layout)
        streams = self.attn_hc.expand(streams, x, post, comb)
        post, comb, x = self.ffn_hc(streams)
        return self.ffn_hc.expand(streams, self.mlp(self.post_attention_layernorm(x)), post, comb), pools


class Backbone(plain.Glm5NextTextModel):
    """`Glm5NextTextModel` on this rank's tokens."""

    runtime: GlmRuntime

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, attention_mask=None, use_cache=None):
        """input_ids [B, L] or inputs_embeds [B, L, D], this rank's; position_ids [B or 1, L], which restart where a packed
        document begins. Collective over the ranks that share the rows.

        Raises:
            PreflightError: a mask or use_cache; ids and embeddings both, or neither; sharded rows without positions; positions of
                another shape; see `TokenLayout`.
        """
        if attention_mask is not None or use_cache:
            raise PreflightError(
                "attention_mask and use_cache are not taken: pad rows at their end with labels of -100, mark packed documents by "
                "position_ids that restart"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise PreflightError("give input_ids or inputs_embeds, one of the two")
        B, L = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        if position_ids is None and self.runtime.split.size > 1:
            raise PreflightError("rows over several ranks need position_ids: each token's place in its document")
        if position_ids is not None and (position_ids.is_floating_point() or tuple(position_ids.shape) not in ((1, L), (B, L))):
            raise PreflightError(
                f"position_ids are {position_ids.dtype} {tuple(position_ids.shape)} with {B} rows of {L} tokens: give integers, "
                f"(1, {L}) or ({B}, {L})"
            )
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        layout = TokenLayout(self.runtime.split, position_ids, hidden.shape[1])
        hidden = hidden.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        pools = None
        for layer in self.layers:
            hidden, pools = layer(hidden, layout=layout, prev_topk_indices=pools)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(self.hc_head(hidden)))


class LossHead(nn.Linear):
    """The output projection, which gives logits, or with labels the sum of token losses without them ever existing whole."""

    tile_tokens: int = LOSS_TILE_TOKENS

    def forward(self, hidden: torch.Tensor, shift_labels: torch.Tensor | None = None) -> torch.Tensor:
        if shift_labels is None:
            return linear(hidden, self.weight)
        preflight.check_autocast(hidden.device.type)
        return tiled_loss_sum(hidden, self.weight, shift_labels, tile_tokens=self.tile_tokens)


def replacements() -> dict[type[nn.Module], type[nn.Module]]:
    """transformers' class -> the subclass of it that runs here.

    A replacement adds no parameter and has no __init__. Where it declares `runtime` it is given the model's `GlmRuntime`.
    Attention is called with `layout=`, the batch's `TokenLayout`; a hyper-connection has `expand`.
    """
    return {
        plain.Glm5NextTextModel: Backbone,
        plain.Glm5NextTextDecoderLayer: DecoderLayer,
        plain.Glm5NextTextAttention: SparseAttention,
        plain.Glm5NextTextLinearAttention: KimiDeltaAttention,
        plain.Glm5NextTextIndexer: PooledIndexer,
        plain.Glm5NextTextHyperConnection: HyperConnection,
        plain.Glm5NextTextMoE: MixtureOfExperts,
    }


LEAVES: tuple[type[nn.Module], ...] = (KimiDeltaAttention, MixtureOfExperts)
"""Modules whose parameters are used as a whole, for `deepspeed.utils.set_z3_leaf_modules`: ZeRO-3 must gather them together."""


def replace_modules(model: nn.Module, runtime: GlmRuntime) -> None:
    """Give every module of `replacements` its new class, and those that declare one the runtime."""
    known = replacements()
    for module in model.modules():
        module.__class__ = known.get(type(module), type(module))
        if "runtime" in _annotations(type(module)):
            module.runtime = runtime


def _annotations(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in inspect.get_annotations(base)}


def check_settings(settings: GlmSettings, config: GlmTextConfig) -> None:
    """What of the settings can be checked before tensors are there."""
    sparse.check_kernel_name(settings.kernel)
    delta.check_kernel_name(settings.kda.kernel)
    conv.check_tile(settings.kda.tile_tokens, config.linear_conv_kernel_dim)


def check_projections(model: nn.Module) -> None:
    """No hooks on what is used without being called; to be asked before DeepSpeed puts on its own."""
    parts = {SparseAttention: sparse.LINEAR, KimiDeltaAttention: kda.SUBMODULES, MixtureOfExperts: (*moe.LINEAR, "gate", "experts")}
    for name, module in model.named_modules():
        preflight.check_hooks(name, module, parts.get(type(module), ()))


def _beyond(name: str, layers: int) -> bool:
    """Whether a weight is of a decoder layer after so many."""
    found = re.search(r"layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= layers


class Glm5NextForCausalLM(plain.Glm5NextPreTrainedModel):
    """Causal LM over `Glm5NextTextModel`.

        model = Glm5NextForCausalLM(preset("glm-mini"))
        model = Glm5NextForCausalLM.from_pretrained(folder)
        model.use(GlmRuntime(GlmSettings(), TokenSplit.of(group)))

    The indexers are frozen: they get no gradient, here as in transformers, and optimizers need not hold state for them.
    """

    config_class = GlmTextConfig
    config: GlmTextConfig
    base_model_prefix = "model"
    checkpoint_contexts = staticmethod(selection_contexts)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _keys_to_ignore_on_load_unexpected = [*plain.Glm5NextPreTrainedModel._keys_to_ignore_on_load_unexpected, r"model\.visual\."]

    def __init__(self, config: GlmTextConfig, runtime: GlmRuntime | None = None) -> None:
        super().__init__(config)
        check_config(config)
        # Published names and transformers' own differ; the conversions between them go by a model's type or class.
        conversions = get_checkpoint_conversion_mapping("glm5_next")
        register_checkpoint_conversion_mapping(type(self).__name__, conversions, overwrite=True)
        self.model = plain.Glm5NextTextModel(config)
        self.lm_head = LossHead(config.hidden_size, config.vocab_size, bias=False)
        self.use(runtime or GlmRuntime())
        self.post_init()
        self.freeze_indexers()

    @classmethod
    def from_pretrained(cls, folder, *args, key_mapping: dict[str, str] | None = None, output_loading_info: bool = False, **kwargs):
        """`PreTrainedModel.from_pretrained`, which also takes a checkpoint of the vision-language model: its language model.

        Raises:
            ValueError: the checkpoint's configuration has no index_kpool; it lacks weights (transformers would make random ones
                and say so in a log); it has weights that the model does not (transformers would leave them out).
        """
        mapping = {r"^model\.language_model\.": "model."} | (key_mapping or {})
        model, info = super().from_pretrained(folder, *args, key_mapping=mapping, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} weights of {cls.__name__}, {missing[0]} among them: it is no checkpoint of this model"
            )
        extra = sorted(info["unexpected_keys"])
        if "num_hidden_layers" in kwargs:       # fewer layers than the checkpoint has were asked for
            extra = [name for name in extra if not _beyond(name, len(model.model.layers))]
        if extra:
            raise ValueError(
                f"{folder} has {len(extra)} weights that {cls.__name__} does not, {extra[0]} among them: another model, or quantised; "
                "fewer layers than it has are had by num_hidden_layers="
            )
        model.freeze_indexers()     # loading made new parameters
        return (model, info) if output_loading_info else model

    def freeze_indexers(self) -> None:
        """No gradient, and so no optimizer state and no weight decay, for what is not trained."""
        for module in self.modules():
            if isinstance(module, PooledIndexer):
                module.requires_grad_(False)

    @property
    def runtime(self) -> GlmRuntime:
        return self.model.runtime

    def share_over_ranks(self, config, ds_config=None):
        """The handle of this model's rows over the ranks of a sequence; `upipe.apply` calls it. See `upipe.glm.apply.apply_glm`."""
        from upipe.glm.apply import apply_glm

        return apply_glm(self, config, ds_config)

    def use(self, runtime: GlmRuntime) -> None:
        """Compute with these settings and groups from now on.

        Raises:
            PreflightError: settings that this model can run nowhere: an unknown kernel, tiles smaller than the convolution's halo.
        """
        check_settings(runtime.settings, self.config)
        replace_modules(self, runtime)
        for index, layer in enumerate(self.model.layers):
            if isinstance(layer.mlp, MixtureOfExperts):
                layer.mlp.layer = index
        self.lm_head.tile_tokens = runtime.settings.loss_tile_tokens

    def forward(
        self, input_ids=None, position_ids=None, labels=None, shift_labels=None, inputs_embeds=None, attention_mask=None, use_cache=None
    ):
        """Logits, or a loss without logits.

        Args:
            input_ids: [B, L] int64, this rank's tokens; or inputs_embeds [B, L, D].
            position_ids: [B or 1, L], restarting where a packed document begins; None: whole rows of one document.
            labels: [B, L], not shifted, -100 ignored, of whole rows: `loss` is the mean over valid tokens. A document's first
                token must then be ignored, as `upipe.data` does it.
            shift_labels: [B, L], the token that each position predicts, or -100: `loss` is the sum over this rank's valid
                tokens (`upipe.loss.global_loss` makes it the loss over all), whatever `labels` are.

        Raises:
            PreflightError: labels on sharded rows; see `Backbone.forward`.
        """
        hidden = self.model(input_ids, position_ids, inputs_embeds, attention_mask, use_cache).last_hidden_state
        if labels is not None and shift_labels is None:
            if self.runtime.split.size > 1:
                raise PreflightError("labels of a sharded row cannot be shifted on one rank: shift whole rows, and give shift_labels")
            following = pad(labels[:, 1:], (0, 1), value=IGNORE)
            return CausalLMOutputWithPast(loss=self.lm_head(hidden, following) / (following != IGNORE).sum().clamp(min=1))
        if shift_labels is not None:
            return CausalLMOutputWithPast(loss=self.lm_head(hidden, shift_labels))
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
