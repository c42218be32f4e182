"""The shape that training systems are compared on: 6 layers, d_model 256, 4 heads of 64, d_ff 1024."""

VOCAB_SIZE, SEGMENT_LEN, MEM_LEN, LANES = 256, 256, 256, 8
LAYERS, D_MODEL, HEADS, D_HEAD, D_FF = 6, 256, 4, 64, 1024
