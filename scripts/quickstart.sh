#!/usr/bin/env bash
# PPO from nothing on a machine with Python 3.11 and two cores: set-up, model and data, SFT warm-up, PPO, results.
# Arguments are Hydra overrides of the PPO run, for example:
#   bash scripts/quickstart.sh trainer.total_training_steps=10 actor.optim.lr=3e-4
# SEED=2 gives another run: other data, other weights, other samples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-$PWD/.venv}"
SEED="${SEED:-1}"
OUT=outputs/quickstart
begin=$SECONDS

say() { printf '\n[quickstart %3d s] %s\n' $((SECONDS - begin)) "$*"; }
launch() { "$VENV/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$@"; }

case " $* " in
*" -h "* | *" --help "*)
  sed -n '2,5s/^# \{0,1\}//p' "$0"
  exit 0
  ;;
esac

VENV="$VENV" bash scripts/setup_env.sh
# One thread per rank: there is a rank per core, and more threads would only get in each other's way.
export OMP_NUM_THREADS=1
# vLLM's few compiled kernels take longer to compile than this run takes, and would need a C++ compiler.
export TORCH_COMPILE_DISABLE=1
export TOKENIZERS_PARALLELISM=false
# Deprecations inside the pinned packages are no news to whoever runs this.
export PYTHONWARNINGS="${PYTHONWARNINGS:-ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning}"

# Broken overrides are refused here, not after the warm-up's minutes.
run=("trainer.seed=$SEED" "data.seed=$SEED" "rollout.seed=$SEED" "$@")
where=$("$VENV/bin/python" - "${run[@]}" <<'END'
import sys

from rlhf_megatron import get_config
from rlhf_megatron.errors import ConfigError

try:
    trainer = get_config("quickstart", overrides=sys.argv[1:]).trainer
except ConfigError as error:
    sys.exit(f"{error}\nNothing was started.")
print(trainer.export_hf, trainer.default_local_dir)
END
)
read -r exported folder <<<"$where"

say "model with random weights, and data (seed $SEED)"
"$VENV/bin/python" scripts/make_quickstart.py --out "$OUT" --seed "$SEED"

# Now files and the number of ranks can be checked, too. The warmed-up model will have the random one's sizes.
WORLD_SIZE=2 "$VENV/bin/python" -c '
import sys
from rlhf_megatron.config.command_line import main_config
main_config(sys.argv[1:], "ppo")' experiment=quickstart "model.path=$OUT/random_model" "${run[@]}"

say "supervised warm-up on flawed demonstrations, 2 ranks"
launch -m rlhf_megatron.train_sft experiment=sft_quickstart "trainer.seed=$SEED" "data.seed=$SEED"

say "PPO, 2 ranks: actor TP2, critic DP2, two vLLM replicas"
launch -m rlhf_megatron.train_ppo experiment=quickstart "${run[@]}"

if [ "$exported" = True ]; then
  say "the trained policy in transformers"
  "$VENV/bin/python" scripts/check_quickstart.py --before "$OUT/sft/hf_model" --after "$folder/hf_model" \
    --held-out "$OUT/data/val.jsonl"
fi

cat <<END

  TensorBoard          $VENV/bin/tensorboard --logdir $folder/tensorboard
  samples              $folder/samples.jsonl
END
[ "$exported" != True ] || echo "  HuggingFace folder   $folder/hf_model"
say "done"
