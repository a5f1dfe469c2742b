#!/usr/bin/env bash
# The start of the image's target runpod. RunPod mounts its volume as root's, and can ask for no other user: cache/ and outputs/
# on it are made the image's user's, who trains. The words are those of train.py.
set -euo pipefail
cd /workspace

# A secret that the account does not have comes as the template wrote it.
missing=()
for name in $(compgen -e); do
    if [[ ${!name} == "{{ RUNPOD_SECRET_"* ]]; then
        missing+=("$name")
        unset "$name"
    fi
done
[ "${#missing[@]}" -eq 0 ] || echo "this account has no secret for ${missing[*]}"

train=(python /app/train.py "$@")
if [ "$(id -u)" -ne 0 ]; then
    exec "${train[@]}"
fi
mkdir -p cache outputs
# Only what is not the user's yet: a network volume is slow. Some know no owners at all; whether the user may write counts.
find cache outputs ! -user trainer -exec chown -h trainer:trainer {} + || true
user=(setpriv --reuid trainer --regid trainer --init-groups --inh-caps=-all --bounding-set=-all --no-new-privs)
for folder in cache outputs; do
    if ! "${user[@]}" test -w "$folder"; then
        echo "error: $PWD/$folder belongs to $(stat -c %u:%g "$folder") and cannot be given to the user that trains" \
            "($(id -u trainer):$(id -g trainer)); run chmod -R a+rwX $PWD/cache $PWD/outputs from where it may be changed" >&2
        exit 2
    fi
done
exec "${user[@]}" env HOME=/home/trainer "${train[@]}"
