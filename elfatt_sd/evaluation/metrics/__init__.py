"""Further metrics of a run, besides distances, PSNR and SSIM: what a protocol's `[[metrics]]` ask for."""
