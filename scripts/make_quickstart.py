"""Makes the quickstart's model and data: `python scripts/make_quickstart.py --out outputs/quickstart --seed 1`.

The task is reasoning-gym's rotate_matrix with 2x2 matrices and quarter, half and three-quarter turns. The
demonstrations for the supervised warm-up are flawed on purpose: for most quarter and three-quarter turns the last
number is wrong, a repetition of the one before it. Imitation copies such a habit, and the verifier sees it. So the
warmed-up policy answers in the right form and is often wrong, and PPO, which gets scores and no demonstrations, has
something to mend.

What is written (the same for the same seed):

    random_model/      Qwen2 architecture, random weights, with a byte tokenizer
    data/sft.jsonl     training prompts with flawed demonstrations
    data/train.jsonl   training prompts with what the verifier needs
    data/val.jsonl     held-out prompts, none of them in the two files above
"""

import argparse
import json
import random
import re
from pathlib import Path

import torch
from reasoning_gym.algorithmic.rotate_matrix import QUESTION_TEMPLATE
from tokenizers import pre_tokenizers
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

from rlhf_megatron.rewards.reasoning_gym_data import generate_reasoning_gym

TASK = "rotate_matrix"
TASK_KWARGS = {"min_n": 2, "max_n": 2, "min_rotations": 1, "max_rotations": 3}


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, and one for each fixed piece of the task's question, which keeps sequences short."""
    symbols = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # Qwen2's own class: transformers takes it for any folder whose model is a Qwen2, whatever the folder says.
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(symbols)},
        merges=[],
        unk_token=None,
        bos_token=None,
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=256,
    )
    pieces = [piece for piece in re.split(r"{\w+}", QUESTION_TEMPLATE) if len(piece) > 1]
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in pieces])
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """About 0.3M parameters; large enough for the task, small enough for a core per rank."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        # Larger than usual: at this width the usual 0.02 makes the first hundred steps learn little.
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


def flawed_demonstration(row: dict, flawed: float, rng: random.Random) -> str:
    """The right answer or, with probability `flawed` unless it is a half turn, one that ends in a repeated number."""
    answer = row["response"]
    is_half_turn = row["extra_info"]["entry"]["metadata"]["num_rotations"] == 2
    if is_half_turn or rng.random() >= flawed:
        return answer
    # Numbers are digits: "a b\nc d" becomes "a b\nc c".
    return answer[:-1] + answer[-3]


def make_rows(folder: Path, rows: int, held_out: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Training rows and held-out rows, no prompt twice."""
    # A few prompts come twice: the task draws from 30,000.
    spare = folder / "generated.jsonl"
    generate_reasoning_gym(TASK, int(1.3 * (rows + held_out)), seed * 1_000_003, spare, **TASK_KWARGS)
    unique = {}
    for line in spare.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        unique.setdefault(row["prompt"], row)
    spare.unlink()
    all_rows = list(unique.values())
    if len(all_rows) < rows + held_out:
        raise SystemExit(f"only {len(all_rows)} different prompts could be drawn; ask for fewer rows")
    return all_rows[held_out : held_out + rows], all_rows[:held_out]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="folder to write to")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and rows")
    parser.add_argument("--rows", type=int, default=8000, help="training prompts")
    parser.add_argument("--held-out", type=int, default=256, help="held-out prompts")
    parser.add_argument("--flawed", type=float, default=0.7, help="share of quarter turns with a wrong demonstration")
    args = parser.parse_args()
    logging.disable_progress_bar()

    data = args.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    train, held_out = make_rows(data, args.rows, args.held_out, args.seed)
    rng = random.Random(args.seed)
    demonstrations = [row | {"response": flawed_demonstration(row, args.flawed, rng)} for row in train]
    write_jsonl(data / "sft.jsonl", demonstrations)
    for name, rows in (("train", train), ("val", held_out)):
        write_jsonl(data / f"{name}.jsonl", [{k: v for k, v in row.items() if k != "response"} for row in rows])

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    model.save_pretrained(args.out / "random_model")
    tokenizer.save_pretrained(args.out / "random_model")

    right = sum(made["response"] == row["response"] for made, row in zip(demonstrations, train, strict=True))
    prompt = tokenizer(train[0]["prompt"]).input_ids
    print(f"task: reasoning_gym/{TASK} {TASK_KWARGS}")
    print(f"rows: {len(train)} for training, {len(held_out)} held out; demonstrations right: {right / len(train):.0%}")
    print(f"model: {model.num_parameters() / 1e6:.2f}M parameters, random; a prompt has {len(prompt)} tokens")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
