"""The offline attention analysis behind `launch.diagnose`."""

LENGTHS = (32, 64, 128, 256, 512, 1024)
SET_SIZES = (1, 5, 10, 20, 100)
