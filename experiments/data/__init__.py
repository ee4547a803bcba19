"""The data sets: one module per set, as tensors on the device.

Belongs here: downloading and verifying files, reading, augmentation, batches, and generated sets
for runs without a download. Must not: know networks, tasks or records.
"""
