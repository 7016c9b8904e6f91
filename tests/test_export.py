"""A checkpoint as a plain Hugging Face folder."""

import pytest
import torch

from tests import training
from upipe import checkpoint
from upipe.cli import main
from upipe.config import ConfigError


def _logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model, model(torch.arange(11)[None]).logits


def _mean_loss(model, config):
    """The loss of the evaluation rows under the plain model."""
    from upipe.config import from_mapping
    from upipe.data import build_data, build_tokenizer
    from upipe.trainer import RunConfig

    data = from_mapping(RunConfig, config).data
    rows = build_data(data, build_tokenizer(data)).evaluation
    with torch.no_grad():
        return sum(float(model(**{k: v[None] for k, v in rows[i].items()}).loss) for i in range(len(rows))) / len(rows)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_exported_checkpoint_is_the_trained_model(worlds, tmp_path, capsys, stage):
    """Its loss on the evaluation rows is what the sharded run evaluated at its last step; embeddings tied at stages 2 and 3."""
    config = training.mapping(
        tmp_path, train__zero_stage=stage, train__steps=2, train__save_every=1, train__eval_every=2, data__eval_fraction=0.3,
        model__tie_embeddings=stage >= 2, model__architecture="qwen3",
    )  # fmt: skip
    records = worlds(2).run(training.evaluated, config=config)[0]["records"]
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    assert f"exported {tmp_path / 'run' / 'checkpoints' / 'step_2'} to {out}" in capsys.readouterr().out
    assert any(out.glob("*.safetensors")) and (out / "config.json").exists()
    model, logits = _logits(out)
    assert _mean_loss(model, config) == pytest.approx(records[-1]["eval_loss"], rel=1e-5)
    state = checkpoint.full_state_dict(tmp_path / "run" / "checkpoints" / "step_2")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    before = tmp_path / "before"
    checkpoint.export(str(tmp_path / "run" / "checkpoints" / "step_1"), before)
    assert not torch.equal(_logits(before)[1], logits)


def test_the_tokenizer_is_exported_too(worlds, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>").save_pretrained(tmp_path / "words")
    (tmp_path / "text.txt").write_text("a b b " * 60)
    config = training.mapping(tmp_path, data__tokenizer=str(tmp_path / "words"), train__steps=1, train__save_every=1)
    worlds(2).run(training.train, config=config)
    checkpoint.export(str(tmp_path / "run"), tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a b")["input_ids"] == [2, 3]
    assert _logits(tmp_path / "out")[1].shape == (1, 11, 256)


def test_export_in_bf16_and_refusals(worlds, tmp_path):
    config = training.mapping(tmp_path, train__dtype="bf16", train__steps=1, train__save_every=1)
    worlds(2).run(training.train, config=config)
    saved = tmp_path / "run" / "checkpoints" / "step_1"
    checkpoint.export(str(saved), tmp_path / "out")
    assert _logits(tmp_path / "out")[0].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="is there already"):
        checkpoint.export(str(saved), tmp_path / "out")
    (saved / "DONE").unlink()
    assert main(["export", str(saved), str(tmp_path / "other")]) == 2
