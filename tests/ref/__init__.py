"""Plain numpy references, one module per op family: readable first, the specification of each operation.

Common conventions:

* Values are float32 arrays that hold exactly what the model would store. Sums are formed in float64 and rounded once,
  except where an intermediate rounding is part of the definition.
* `mode` is one of "fp32" (no bfloat16 rounding anywhere), "bf16" (rounded to bfloat16 wherever a value is stored in it)
  and "fp8" (as bf16, and activations are quantised in front of fp8 and fp4 weights).
* The fake quantisers of keys, values and index vectors belong to the architecture and are active in every mode.
"""
