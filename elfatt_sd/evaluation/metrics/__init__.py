"""Further metrics of a run, beside distances, PSNR and SSIM: what a protocol's `[[metrics]]` ask for."""
