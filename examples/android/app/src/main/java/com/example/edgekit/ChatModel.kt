// A conversation with an artifact of edgekit, by ExecuTorch's own runner: its tokenizer, sampler and streaming.
package com.example.edgekit

import java.io.Closeable
import java.io.File
import org.pytorch.executorch.extension.llm.LlmCallback
import org.pytorch.executorch.extension.llm.LlmModule

/**
 * [folder] is an artifact's; [chatFormat] is what `edgekit inspect --chat-format` printed. Use it from one background
 * thread; only [stop] may be called from another.
 */
class ChatModel(
  folder: File,
  chatFormat: String,
  private val system: String? = null,
  private val temperature: Float = 0.7f,
) : Closeable {
  private val format = ChatFormat(chatFormat)
  private val module =
    LlmModule(File(folder, "model.pte").path, File(folder, "tokenizer.json").path, temperature)
  private var hasBegun = false

  /** Read the weights now, so that the first answer does not wait for them. */
  fun load() = module.load()

  /** Answer [question]; [onText] gets the text piece by piece. [most]: tokens of the prompt and the answer. */
  fun ask(question: String, most: Int, onText: (String) -> Unit) {
    val prompt = if (hasBegun) format.next(question) else format.begin(system, question)
    hasBegun = true
    val callback =
      object : LlmCallback {
        override fun onResult(result: String) {
          if (!format.isEnd(result)) onText(result)
        }
      }
    module.generate(prompt, most, callback, false, temperature, 0, 0)
  }

  fun stop() = module.stop()

  /** Forget the conversation. */
  fun reset() {
    module.resetContext()
    hasBegun = false
  }

  override fun close() = module.close()
}
