import edgekit.NativeModel
import java.util.HexFormat

/** Prints what the test compares with Python: a name and the bytes of a text in each line. */
fun show(name: String, text: String) = println("$name ${HexFormat.of().formatHex(text.encodeToByteArray())}")

fun failure(body: () -> Unit): String = runCatching(body).exceptionOrNull()?.message ?: "nothing was thrown"

fun main(words: Array<String>) {
    val (folder, library, prompt, messages) = words
    val model = NativeModel(folder, library, threads = 1)
    val pieces = StringBuilder()
    val greedy = model.generate(prompt, NativeModel.Options(maxTokens = 40)) { pieces.append(it) }
    show("greedy", greedy.text)
    show("streamed", pieces.toString())
    show("tokens", greedy.tokens.joinToString(" "))
    show("reason", greedy.reason.name)
    check(greedy.promptTokens > 0 && greedy.prefillSeconds > 0 && greedy.decodeSeconds > 0)

    val sampled = NativeModel.Options(
        maxTokens = 40, temperature = 0.9, topK = 50, topP = 0.95, minP = 0.01, typicalP = 0.95, repetitionPenalty = 1.1,
        presencePenalty = 0.2, frequencyPenalty = 0.1, seed = 1_000_000_000_007, stops = listOf("zzz", "é🙂"),
    )
    show("sampled", model.generate(prompt, sampled).text)
    val rendered = model.render(messages)
    show("rendered", rendered)
    show("chat", model.generate(rendered, NativeModel.Options(maxTokens = 30, seed = 5, temperature = 0.8), isChat = true).text)

    val memory = model.memory()
    show("cache", memory.cache.toString())
    check(memory.cacheUsed!! in 1..memory.cache!! && memory.processPrivate!! > 0 && memory.processPeak!! > 0)
    check(memory.weights!! > 0 && memory.engine!! > 0 && memory.activations!! >= 0)

    val cancelled = model.generate(prompt, NativeModel.Options(ignoresEnds = true)) { model.cancel() }
    show("cancelled", cancelled.reason.name)
    show("listener", failure { model.generate(prompt) { error("the listener 🙂 failed") } })
    show("after it", model.generate(prompt, NativeModel.Options(maxTokens = 40)).text)
    show("option", failure { model.generate(prompt, NativeModel.Options(topP = 0.0)) })
    show("template", failure { model.render("[1]") })
    show("folder", failure { NativeModel("/nowhere/🙂") })
    NativeModel.verify(folder)
    show("verified", failure { NativeModel.verify("/nowhere/🙂") })
    model.close()
    model.close()
    show("closed", failure { model.generate(prompt) })
}
