"""Features of Inception compared with those of pytorch-fid and clean-fid, on the same weights.

pip install --no-deps pytorch-fid clean-fid
python -m benchmarks.fid_packages pt_inception-2015-12-05-6726825d.pth
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import torch
from cleanfid.resize import build_resizer
from pytorch_fid import inception

from elfatt_sd.evaluation.features import load_extractor, resized
from elfatt_sd.files import sha256_of_file

SIZES = ((64, 80), (512, 512), (300, 299))


@torch.no_grad()
def main() -> None:
    """Print the largest differences of features and of resized images, and stop where one is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="the file that pytorch-fid and torch-fidelity publish")
    weights = parser.parse_args().weights
    known = {"weights": weights, "sha256": sha256_of_file(weights)}
    with mock.patch.object(inception, "load_state_dict_from_url", lambda *_, **__: torch.load(weights)):
        network = inception.InceptionV3([3]).eval()
    plain, clean = (load_extractor(f"inception:{way}", **known) for way in ("pytorch-fid", "clean-fid"))
    for height, width in SIZES:
        images = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8)
        pixels = torch.from_numpy(build_resizer("clean")(images[0].permute(1, 2, 0).numpy())).permute(2, 0, 1)
        pairs = {
            "features of pytorch-fid": (plain(images), network(images / 255)[0].flatten(1), 1e-4),
            "pixels of clean-fid": (resized(images, (299, 299))[0], pixels, 1e-4),  # torch weighs in single precision
            "features of clean-fid": (clean(images), clean.network((pixels[None] - 128) / 128), 1e-3),
        }
        for name, (ours, theirs, tolerance) in pairs.items():
            apart = float((ours - theirs).abs().max() / theirs.abs().max())
            print(f"{height}x{width}, {name}: {apart:.1e} of the largest value apart", flush=True)
            assert apart < tolerance, f"more than {tolerance:g}"


if __name__ == "__main__":
    main()
