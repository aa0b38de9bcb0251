#!/bin/sh
# Brings the index of the videos up to date, then serves it; further words are options of `tvr index`.
set -eu
: "${TVR_VIDEOS:?names the folder of the videos}" "${TVR_INDEX:?names the folder of the index}"
tvr index "$TVR_VIDEOS" --out "$TVR_INDEX" ${TVR_CHECKPOINT:+--ckpt_path "$TVR_CHECKPOINT"} "$@"
exec tvr serve --index "$TVR_INDEX" --videos "$TVR_VIDEOS" --host "${TVR_HOST:-127.0.0.1}" --port "${TVR_PORT:-8321}"
