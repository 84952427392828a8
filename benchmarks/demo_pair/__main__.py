"""Train the demo pair: `python -m demo_pair WORK` in benchmarks/. Run again to go on after an interruption.

WORK holds the data, checkpoints and logs; about an hour and a half on two CPU cores. The result goes to
WORK/target, WORK/drafter and WORK/facts.json, or into the package with --install. Needs PyTorch,
sentencepiece, tokenizers and safetensors.
"""

import argparse
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo_pair.data import build_data
from demo_pair.export import END_OF_TURN, export_drafter, export_target
from demo_pair.taught import FACTS
from demo_pair.train_drafter import train_drafter
from demo_pair.train_target import train_target
from mlx_spec import demo

LOGS = ("target_log.json", "drafter_log.json")


def main() -> None:
    """Run the recipe from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path, help="folder for data, checkpoints, logs and the result")
    parser.add_argument("--seed", type=int, default=1239)
    parser.add_argument("--target-steps", type=int, default=2800)
    parser.add_argument("--polish-steps", type=int, default=500)
    parser.add_argument("--drafter-steps", type=int, default=1050)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--install", action="store_true", help="copy the result into the package")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    work: Path = settings.work
    if not (work / "tokenizer.json").exists():
        build_data(work, settings.seed)
    end = Tokenizer.from_file(str(work / "tokenizer.json")).get_vocab()[END_OF_TURN]
    target = train_target(work, settings.target_steps, settings.polish_steps, settings.seed)
    export_target(target, work, work / "target", end)
    drafter = train_drafter(work, target, settings.drafter_steps, settings.seed)
    export_drafter(drafter, work, work / "drafter", end)
    if settings.install:
        install(work)


def install(work: Path) -> None:
    """Copy the result and the logs into the package."""
    for source, place in ((work / "target", demo.TARGET), (work / "drafter", demo.DRAFTER)):
        shutil.copytree(source, place, dirs_exist_ok=True)
    shutil.copyfile(work / "facts.json", FACTS)
    for name in LOGS:
        shutil.copyfile(work / name, Path(__file__).with_name(name))


if __name__ == "__main__":
    main()
