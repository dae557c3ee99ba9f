"""Bytes of the training state per trained parameter, of AdamW in float32."""

#: Parameter in float32, from which the compute dtype's copy is cast.
WEIGHT = 4
#: AdamW's two moments.
MOMENTS = 8
#: Parameter and moments, which an update reads and writes.
STATE = WEIGHT + MOMENTS
#: Sum of gradients.
GRADIENT = 4
#: What an update moves in all, and the part of it that ZeRO 1 divides. State is read and written
#: (24), the gradient is read and cleared (8), and the parameter is cast once (6). What the other 4
#: are was not recorded when these totals were chosen.
UPDATE = 42
UPDATE_OF_STATE = 30
