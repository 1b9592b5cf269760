"""Writes a GGUF file of random weights: `model.py PRESET TYPE OUT [--layers N] [--experts N] [--vocab N]`.

Progress goes to stdout as lines `progress DONE TOTAL`, in bytes.
"""

import argparse
import os
from pathlib import Path

import gguf
import numpy as np

import presets
import vocab

TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
BLOCK = 32
# Values in a tile of random data: a whole number of blocks, and that number is prime, so that no two experts and
# (up to 131071 of them) no two rows of a tensor are the same.
TILE = BLOCK * 131071


class Random:
    """Seeded Gaussian data of any size, from one tile a scale: a tensor is that tile, repeated, from an offset."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.unit = self.rng.standard_normal(TILE, dtype=np.float32)
        self.tiles = {}

    def values(self, tensor: presets.Tensor) -> np.ndarray:
        """The values of a small F32 tensor."""
        count = int(np.prod(tensor.shape))
        start = int(self.rng.integers(TILE))
        values = np.resize(np.roll(self.unit, -start)[: min(count, TILE)], count)
        return (values * tensor.std + tensor.mean).astype(np.float32)

    def tiled(self, tensor: presets.Tensor, qtype, progress: "Progress") -> "Tiled":
        key = (tensor.std, qtype)
        if key not in self.tiles:
            self.tiles[key] = gguf.quants.quantize(self.unit * tensor.std, qtype).view(np.uint8).reshape(-1)
        start = int(self.rng.integers(TILE // BLOCK))
        return Tiled(self.tiles[key], start, tensor_bytes(tensor, qtype), progress)


def tensor_bytes(tensor: presets.Tensor, qtype) -> int:
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    if tensor.shape[0] % block:
        raise SystemExit(f"{tensor.name}: rows of {tensor.shape[0]} values are no whole number of blocks of {block}")
    return int(np.prod(tensor.shape)) // block * size


class Tiled:
    """What `GGUFWriter.write_tensor_data` wants of an array (`nbytes`, `tofile`), without holding the tensor."""

    def __init__(self, tile: np.ndarray, start_block: int, nbytes: int, progress: "Progress"):
        self.tile, self.nbytes, self.progress = tile, nbytes, progress
        self.start = start_block * (len(tile) // (TILE // BLOCK))

    def tofile(self, file):
        left, at = self.nbytes, self.start
        while left:
            part = self.tile[at : at + left]
            part.tofile(file)
            self.progress.add(len(part))
            left -= len(part)
            at = 0


class Progress:
    """A line a percent; a file of `total` bytes."""

    def __init__(self, total: int):
        self.total, self.done, self.shown = total, 0, -1

    def add(self, nbytes: int):
        self.done += nbytes
        if self.done * 100 // self.total != self.shown:
            self.shown = self.done * 100 // self.total
            print(f"progress {self.done} {self.total}", flush=True)


def add_keys(writer: gguf.GGUFWriter, name: str, model: presets.Model, ftype):
    writer.add_name(name)
    writer.add_file_type(ftype)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(model.n_layer)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in model.keys.items():
        adders[type(value)](f"{model.arch}.{key}", value)
    tokens, types, merges = vocab.build(model.n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)


def write(out: Path, preset: str, type_name: str, model: presets.Model, seed: int):
    qtype, ftype = TYPES[type_name]
    writer = gguf.GGUFWriter(out, model.arch)
    add_keys(writer, f"{preset} (random weights)", model, ftype)

    f32 = gguf.GGMLQuantizationType.F32
    sizes = [tensor_bytes(t, f32 if t.f32 else qtype) for t in model.tensors]
    for tensor, size in zip(model.tensors, sizes):
        writer.add_tensor_info(
            tensor.name, tensor.shape[::-1], np.dtype(np.float32), size, f32 if tensor.f32 else qtype
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()

    random, progress = Random(seed), Progress(sum(sizes))
    for tensor in model.tensors:
        if tensor.f32:
            values = random.values(tensor)
            writer.write_tensor_data(values)
            progress.add(values.nbytes)
        else:
            writer.write_tensor_data(random.tiled(tensor, qtype, progress))
    writer.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("preset", choices=presets.PRESETS)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    model = presets.build(args.preset, args.layers, args.experts, args.vocab, args.type == "q8_0")
    unfinished = args.out.with_name(args.out.name + ".part")
    write(unfinished, args.preset, args.type, model, args.seed)
    os.replace(unfinished, args.out)


if __name__ == "__main__":
    main()
