#!/bin/sh
# The audits whose results are under docs/results: every method at epsilon 1 and 4, white and shaped noise apart, the
# broken variants, a model.
# sh benchmarks/audit.sh [FOLDER]        # a few minutes each on two cores
set -e
out=${1:-docs/results}
methods="dpsgd lp-dpsgd inner-outer dp-pmlf dp-pmlf-without-pm dp-pmlf-without-lf disk"
for epsilon in 1 4; do
    pmlf audit --method $methods --epsilon $epsilon --seed 0 --json --plot "$out/audit-epsilon-$epsilon.png" \
        > "$out/audit-epsilon-$epsilon.json"
    pmlf audit --method dp-pmlf-shaped lp-dpsgd-shaped --epsilon $epsilon --seed 0 --json \
        --plot "$out/audit-shaped-epsilon-$epsilon.png" > "$out/audit-shaped-epsilon-$epsilon.json"
done
pmlf audit --controls --seed 0 --json --plot "$out/audit-controls.png" > "$out/audit-controls.json"
pmlf audit --model cnn5 --seed 0 --json > "$out/audit-model.json"
