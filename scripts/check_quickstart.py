"""Loads the quickstart's policies with transformers and lets them answer the held-out prompts, greedily.

This uses nothing of rlhf_megatron but the verifier: what a user of the HuggingFace folders gets.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from rlhf_megatron.rewards.builtin import compute_score


@torch.no_grad()
def accuracy(folder: Path, rows: list[dict], max_new_tokens: int) -> float:
    """Share of rows that the model in the folder answers wholly right."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    answers = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[:, inputs.input_ids.shape[1] :]
    right = 0
    for row, answer in zip(rows, tokenizer.batch_decode(answers, skip_special_tokens=True), strict=True):
        right += bool(compute_score(row["data_source"], answer, row["ground_truth"], row["extra_info"])["acc"])
    return right / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="HuggingFace folder of the warmed-up policy")
    parser.add_argument("--after", type=Path, required=True, help="HuggingFace folder of the PPO policy")
    parser.add_argument("--held-out", type=Path, required=True, help="JSONL of held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=8)
    args = parser.parse_args()
    logging.disable_progress_bar()
    for folder in (args.before, args.after):
        if not (folder / "config.json").is_file():
            sys.exit(f"{folder} is no HuggingFace folder: the run before this check did not export one")

    rows = [json.loads(line) for line in args.held_out.read_text(encoding="utf-8").splitlines()]
    before, after = (accuracy(folder, rows, args.max_new_tokens) for folder in (args.before, args.after))
    print(f"\nHeld-out accuracy, greedy, {len(rows)} prompts, answered with transformers")
    print(f"  {'before PPO':<11} {before:7.1%}   {args.before}")
    print(f"  {'after PPO':<11} {after:7.1%}   {args.after}")
    print(f"  {'gain':<11} {100 * (after - before):+5.1f} points")


if __name__ == "__main__":
    main()
