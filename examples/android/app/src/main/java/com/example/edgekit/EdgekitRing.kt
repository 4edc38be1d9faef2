// Text without end on a phone: sinks and a ring, by the method `step`, which leaves position, slot and mask to the app.
//
// Written against the documented API of org.pytorch:executorch-android. NOT COMPILED OR RUN by edgekit's tests; the
// same arithmetic is tested from Python against a mask over everything.
package com.example.edgekit

import org.pytorch.executorch.EValue
import org.pytorch.executorch.Module
import org.pytorch.executorch.Tensor

/**
 * The first [sinks] tokens and the newest [window] are seen. Positions count on, so a text ends where the program's rotary
 * tables do (`edgekit_positions`). Only for models without windowed layers of their own (`edgekit_window` is 0).
 */
class EdgekitRing(private val module: Module, private val sinks: Int = 4, private val window: Int = 512) {
  private val slots = module.execute("get_max_context_len")[0].toInt().toInt()
  private val positions = module.execute("edgekit_positions")[0].toInt().toInt()
  private var position = 0

  init {
    require(sinks + window <= slots) { "$sinks sinks and a window of $window do not fit $slots slots" }
    require(module.execute("edgekit_window")[0].toInt() == 0L) { "this model has windows of its own" }
  }

  /** Append one token; the logits after it. */
  fun feed(token: Int): FloatArray {
    require(position < positions) { "the rotary tables end at $positions" }
    val slot = if (position < sinks) position else sinks + (position - sinks) % window
    val filled = minOf(position + 1, sinks + window)
    val mask = FloatArray(slots) { if (it < filled) 0f else -1e30f }
    val found = module.execute(
      "step",
      EValue.from(Tensor.fromBlob(longArrayOf(token.toLong()), longArrayOf(1, 1))),
      EValue.from(Tensor.fromBlob(longArrayOf(position.toLong()), longArrayOf(1))),
      EValue.from(Tensor.fromBlob(longArrayOf(slot.toLong()), longArrayOf(1))),
      EValue.from(Tensor.fromBlob(longArrayOf(0L), longArrayOf(1))),
      EValue.from(Tensor.fromBlob(mask, longArrayOf(1, slots.toLong()))),
    )
    position += 1
    return found[0].toTensor().dataAsFloatArray
  }
}
