"""Rank videos for a text: pip install onnxruntime tokenizers ftfy av pillow; python example.py TEXT VIDEO..."""

import json
import sys
from html import unescape
from pathlib import Path

import av
import ftfy
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

if __name__ == "__main__":
    folder, (text, *paths) = Path(__file__).parent, sys.argv[1:]
    settings = json.loads((folder / "export.json").read_text())
    how = settings["preparation"]
    if (settings["sampling"], how["interpolation"], how["resize_mode"]) != ("one-fps-uniform", "bicubic", "shortest"):
        print("WARNING: export.json describes other frames than this example reads, so scores differ.", file=sys.stderr)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(unescape(unescape(ftfy.fix_text(text))).strip())
    found = {"ids": np.array([tokens.ids]), "word_mask": np.array([tokens.attention_mask], dtype=bool)}
    size = how["image_size"]
    found["pixels"] = np.zeros((len(paths), settings["frames"], 3, size, size), dtype=np.uint8)
    found["frame_mask"] = np.zeros((len(paths), settings["frames"]), dtype=bool)
    for path, pixels, mask in zip(paths, found["pixels"], found["frame_mask"], strict=True):
        seconds, start = list[np.ndarray](), None
        for frame in av.open(path).decode(video=0):
            start = frame.time if start is None else start
            if frame.time - start >= len(seconds) - 1e-6:
                image = frame.to_image()
                sides = [int(size * side / min(image.size)) for side in image.size]
                left, top = (round((side - size) / 2) for side in sides)
                seconds.append(np.asarray(image.resize(sides, 3))[top : top + size, left : left + size])
        chosen = np.linspace(0, len(seconds) - 1, min(len(mask), len(seconds)), dtype=int)
        pixels[: len(chosen)], mask[: len(chosen)] = np.stack(seconds)[chosen].transpose(0, 3, 1, 2), True
    for name in settings["files"]:  # text.onnx, video.onnx, and head.onnx unless scores are products of vectors
        model = onnxruntime.InferenceSession(folder / name)
        outputs = model.run(None, {node.name: found[node.name] for node in model.get_inputs()})
        found |= zip([node.name for node in model.get_outputs()], outputs, strict=True)
    scores = found["scores"] if "scores" in found else found["text_vector"] @ found["video_vector"].T
    print(*sorted(zip(scores[0].tolist(), paths, strict=True), reverse=True), sep="\n")
