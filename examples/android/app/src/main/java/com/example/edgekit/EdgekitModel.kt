// The smallest use of an edgekit artifact in an Android app: one .pte, one conversation, greedy choice.
//
// Written against the documented API of org.pytorch:executorch-android. NOT COMPILED OR RUN by edgekit's tests:
// there is no Android toolchain where they run. The same calls, with the same inputs, are tested there from Python.
//
// build.gradle.kts:  implementation("org.pytorch:executorch-android:<the version that edgekit exported with>")
package com.example.edgekit

import java.io.Closeable
import org.pytorch.executorch.EValue
import org.pytorch.executorch.Module
import org.pytorch.executorch.Tensor

/** A loaded program. Not thread-safe: call it from one thread that is not the main one. */
class EdgekitModel(path: String) : Closeable {
  private val module: Module = Module.load(path, Module.LOAD_MODE_MMAP)

  val slots: Int = fact("get_max_context_len")
  val chunk: Int = fact("get_max_seq_len")
  val vocabulary: Int = fact("get_vocab_size")
  private val endsOfText: Set<Int> = module.execute("get_eos_ids").map { it.toInt().toInt() }.toSet()

  /** Tokens that the cache holds. Setting it back forgets the newest: nothing else needs to be done. */
  var held: Int = 0
    private set

  /** Append [tokens]; the logits after the last of them. */
  fun feed(tokens: IntArray): FloatArray {
    require(tokens.isNotEmpty()) { "no tokens" }
    require(held + tokens.size <= slots) { "$held tokens are held, ${tokens.size} more do not fit $slots" }
    var logits = FloatArray(0)
    for (piece in tokens.asList().chunked(chunk)) {
      val ids = LongArray(piece.size) { piece[it].toLong() }
      val found = module.execute(
        "forward",
        EValue.from(Tensor.fromBlob(ids, longArrayOf(1, ids.size.toLong()))),
        EValue.from(Tensor.fromBlob(longArrayOf(held.toLong()), longArrayOf(1))),
      )
      logits = found[0].toTensor().dataAsFloatArray
      held += piece.size
    }
    return logits
  }

  /** Go on after [prompt], telling each token as it comes. */
  fun generate(prompt: IntArray, limit: Int, onToken: (Int) -> Boolean) {
    var logits = feed(prompt)
    repeat(limit) {
      val token = logits.indices.maxBy { logits[it] }
      if (token in endsOfText || !onToken(token) || held == slots) return
      logits = feed(intArrayOf(token))
    }
  }

  /** Forget the newest [count] tokens, for another answer to the same prompt. */
  fun rewind(count: Int) {
    require(count in 0..held) { "cannot forget $count of $held tokens" }
    held -= count
  }

  override fun close() = module.close()

  private fun fact(name: String): Int = module.execute(name)[0].toInt().toInt()
}
