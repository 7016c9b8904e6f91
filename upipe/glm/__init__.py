"""GLM-5.3-Flash's text model (transformers' `glm5_next`): a causal LM with sparse attention that is sparse, over many ranks.

In order of reading: `config`; `context` (tokens over ranks); `indexer` (which tokens) and `sparse` (attention over them); `conv`,
`delta` and `kda` (linear attention); `hyper` and `moe`, with `replay` under them; `model`, and `apply` (under DeepSpeed).
"""

from upipe.glm.config import GlmSettings, GlmTextConfig, preset
from upipe.glm.context import TokenLayout, TokenSplit
from upipe.glm.indexer import selection_contexts
from upipe.glm.model import Glm5NextForCausalLM
from upipe.glm.sparse import GlmRuntime

__all__ = ["Glm5NextForCausalLM", "GlmRuntime", "GlmSettings", "GlmTextConfig", "TokenLayout", "TokenSplit", "preset", "selection_contexts"]
