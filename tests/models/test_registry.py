"""What a user may call a model, and the one clear sentence when it cannot be had."""

from __future__ import annotations

import pytest
import torch
from support.tiny import tiny_checkpoint

from rimuru.errors import ConfigError, UnsupportedModelError
from rimuru.kernels import reference
from rimuru.models.config import ModelConfig
from rimuru.models.registry import build_model, resolve_model


def test_a_folder_is_taken_as_it_is():
    path = tiny_checkpoint("olmoe")
    assert resolve_model(str(path)) == path


def test_a_local_name_wins_and_is_made_only_when_asked_for(tmp_path):
    made = []
    local = {"demo": lambda: made.append(1) or tmp_path}
    assert resolve_model(str(tmp_path), local=local) == tmp_path
    assert made == []
    assert resolve_model("demo", local=local) == tmp_path
    assert made == [1]


@pytest.mark.parametrize(
    "name",
    ["./nowhere", "/nowhere/at/all", "a/b/c", "", "-x", "org/na me", "~/nowhere", "~no-one/x", "x/" * 5000],
)
def test_what_is_neither_folder_nor_hub_id_is_refused(name):
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match="is a file; MODEL must be the folder"):
        resolve_model(str(file))


def test_a_hub_id_without_a_network_says_what_would_work(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        resolve_model("some-org/never-cached-model")
    assert str(caught.value).startswith("model 'some-org/never-cached-model': no such folder here")
    assert "HF_HUB_OFFLINE" in str(caught.value)
    assert "local folder" in str(caught.value)


def test_a_family_that_is_not_served_cannot_be_built():
    config = ModelConfig("llama", 8, 8, 1, 1, 1, 8, 8, 1e-6, 1, 1, 8, True, (0,))
    with pytest.raises(UnsupportedModelError, match="served are mixtral"):
        build_model(config, reference, "meta", torch.float32)
