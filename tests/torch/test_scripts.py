"""What docs/performance.md measures by, where no GPU is needed to run it."""

import functools
from pathlib import Path

import torch

import minisgl.build
from minisgl import EngineConfig

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_decode_steps_measures_several_backends_in_turns(tiny_model, monkeypatch, capsys):
    """Overlapped, as on a GPU: there some of a batch are still being forgotten when the next ones come."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(minisgl.build, "lead", minisgl.build.lead)  # these two are what the script changes
    monkeypatch.setattr(torch.cuda, "device_count", torch.cuda.device_count)
    import decode_steps

    monkeypatch.setattr(decode_steps, "EngineConfig", functools.partial(EngineConfig, overlap=True))
    monkeypatch.setattr(decode_steps, "SIZES", ((2, 8), (20, 600)))
    monkeypatch.setattr(decode_steps, "STEPS", 2)
    folder = tiny_model("Qwen3ForCausalLM", vocab_size=10_000)
    arguments = [str(folder), "reference", "auto", "--device", "cpu", "--tp", "2"]
    monkeypatch.setattr("sys.argv", ["decode_steps.py", *arguments])
    decode_steps.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines[1:]] == [["2", "×", "8"], ["20", "×", "600"]]
    assert all(float(cell.replace(",", "")) > 0 for line in lines[1:] for cell in line[3:] if cell != "·")
