"""Let torchvision be imported beside a torch for the CPU, with which the compiled part of PyPI's build does
not load. vLLM imports it for every model that sees, and uses nothing that is compiled.

    .venv-vllm/bin/python -m scripts.torchvision_without_cuda
"""

from importlib.util import find_spec
from pathlib import Path

DECLARED = """
if not _has_ops():  # else the description of these operators, at the import, fails
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Add it to the package that is installed for this Python, once."""
    spec = find_spec("torchvision")
    assert spec is not None and spec.origin is not None, "torchvision is not installed"
    path = Path(spec.origin).with_name("extension.py")
    text = path.read_text()
    if DECLARED not in text:
        path.write_text(text + DECLARED)


if __name__ == "__main__":
    main()
