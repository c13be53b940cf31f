"""Loads a HuggingFace folder with vLLM, as any user would, and prints log-probs of a prompt's tokens as JSON."""

import json
import os
import sys


def main(folder: str) -> None:
    """Prints the log-prob of each token of the prompt but the first."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    # Inductor would need a C++ compiler for one comparison per token.
    current_platform.simple_compile_backend = "eager"
    prompt = [1, *range(4, 40, 3), 2]
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4, disable_log_stats=True)
    (output,) = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0.0), use_tqdm=False
    )
    found = output.prompt_logprobs[1:]
    print(json.dumps([position[token].logprob for position, token in zip(found, prompt[1:], strict=True)]), flush=True)
    # Destructors of process groups may wait for nobody.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
