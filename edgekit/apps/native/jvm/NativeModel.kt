package edgekit

/**
 * An artifact of the onnx target, opened by edgekit's native library.
 *
 * One thread at a time may call it; [cancel] may be called from any. Call nothing after [close].
 *
 * @param folder the artifact; every file is compared with the hashes of its manifest.
 * @param onnxRuntime the file of ONNX Runtime's library; null: `libonnxruntime.so` of the app or the system.
 * @param threads 0: as planned, within the cores that the process may use.
 * @param exact a text does not depend on drafts and reused prefixes.
 * @param packed a folder that [pack] made on this device; null: weights are packed into private memory.
 * @throws Failed where the artifact is damaged or not supported.
 */
class NativeModel(
    folder: String,
    onnxRuntime: String? = null,
    threads: Int = 0,
    exact: Boolean = false,
    packed: String? = null,
) : AutoCloseable {
    private var handle = open(
        folder.encodeToByteArray(), onnxRuntime?.encodeToByteArray(), threads, exact, packed?.encodeToByteArray(),
    )

    /** An error in one line. */
    class Failed internal constructor(line: ByteArray) : RuntimeException(line.decodeToString())

    /** Options of an answer; the defaults are greedy, without a limit. */
    data class Options(
        val maxTokens: Long = -1,
        val temperature: Double = 0.0,
        val topK: Long = 0,
        val topP: Double = 1.0,
        val minP: Double = 0.0,
        val typicalP: Double = 1.0,
        val repetitionPenalty: Double = 1.0,
        val presencePenalty: Double = 0.0,
        val frequencyPenalty: Double = 0.0,
        val seed: Long = 0,
        val stops: List<String> = emptyList(),
        val ignoresEnds: Boolean = false,
        val reusesPrefix: Boolean = false,
        val draftTokens: Long = 0,
    )

    enum class Reason { STOPPED, OUT_OF_LENGTH, CANCELLED }

    class Answer(
        val text: String,
        val tokens: IntArray,
        val reason: Reason,
        val promptTokens: Long,
        val cachedTokens: Long,
        val draftedTokens: Long,
        val acceptedTokens: Long,
        val prefillSeconds: Double,
        val decodeSeconds: Double,
    )

    /** Bytes; null where the system does not count them. */
    class Memory(
        /** Resident pages of mapped files, which the system may drop. */
        val weights: Long?,
        /** Private: what opening took, with weights that the runtime packed. */
        val engine: Long?,
        /** Keys and values, once the cache is full. */
        val cache: Long?,
        val cacheUsed: Long?,
        /** Private: what was taken since the model was opened, without the cache. */
        val activations: Long?,
        /** Of the whole process. */
        val processPrivate: Long?,
        /** Resident in the whole process at once, files included. */
        val processPeak: Long?,
    )

    /** Measure the model's memory now; takes milliseconds. */
    fun memory(): Memory {
        val found = measured(opened()).map { bytes -> bytes.takeIf { it >= 0 } }
        return Memory(found[0], found[1], found[2], found[3], found[4], found[5], found[6])
    }

    /** The prompt of a chat by the model's own template. Arguments are JSON: a list of messages, of tools, an object. */
    fun render(messages: String, tools: String? = null, options: String? = null): String {
        val (chat, listed, values) = listOf(messages, tools, options).map { it?.encodeToByteArray() }
        return rendered(opened(), chat!!, listed, values).decodeToString()
    }

    /**
     * Answer a text, or with [isChat] one that [render] returned. [onText] gets each piece of text as it is decided, on
     * this thread; what it throws ends the answer and is thrown here.
     */
    fun generate(
        prompt: String,
        options: Options = Options(),
        isChat: Boolean = false,
        onText: (String) -> Unit = {},
    ): Answer {
        val whole = with(options) {
            longArrayOf(maxTokens, draftTokens, topK, seed, if (ignoresEnds) 1 else 0, if (reusesPrefix) 1 else 0)
        }
        val real = with(options) {
            doubleArrayOf(temperature, topP, minP, typicalP, repetitionPenalty, presencePenalty, frequencyPenalty)
        }
        val stops = options.stops.map { it.encodeToByteArray() }.toTypedArray()
        val sink = Sink { onText(it.decodeToString()) }
        val (text, tokens, numbers, seconds) = answered(opened(), prompt.encodeToByteArray(), isChat, whole, real, stops, sink)
        numbers as LongArray
        seconds as DoubleArray
        return Answer(
            (text as ByteArray).decodeToString(), tokens as IntArray, Reason.entries[numbers[0].toInt()],
            numbers[1], numbers[2], numbers[3], numbers[4], seconds[0], seconds[1],
        )
    }

    /** End the answer that is being generated. */
    fun cancel() = stop(opened())

    /** Free the model. Closing twice is allowed. */
    override fun close() {
        release(handle)
        handle = 0
    }

    private fun opened() = handle.also { check(it != 0L) { "this model is closed" } }

    private fun interface Sink {
        fun onText(text: ByteArray)
    }

    companion object {
        init {
            System.loadLibrary("edgekit_jni")
        }

        /** Compare every file of an artifact of any target with its manifest; throws [Failed] where one differs. */
        @JvmStatic
        fun verify(folder: String) = checkFiles(folder.encodeToByteArray())

        /**
         * Pack the weights of an artifact for this device into [packed], a folder that nothing else uses, unless that was
         * done before: openings with it map them. Takes as much private memory as an opening without.
         */
        @JvmStatic
        fun pack(folder: String, onnxRuntime: String? = null, packed: String) =
            makePacked(folder.encodeToByteArray(), onnxRuntime?.encodeToByteArray(), packed.encodeToByteArray())

        @JvmStatic
        private external fun checkFiles(folder: ByteArray)

        @JvmStatic
        private external fun makePacked(folder: ByteArray, onnxRuntime: ByteArray?, packed: ByteArray)

        @JvmStatic
        private external fun open(
            folder: ByteArray, onnxRuntime: ByteArray?, threads: Int, exact: Boolean, packed: ByteArray?,
        ): Long

        @JvmStatic
        private external fun release(handle: Long)

        @JvmStatic
        private external fun stop(handle: Long)

        @JvmStatic
        private external fun measured(handle: Long): LongArray

        @JvmStatic
        private external fun rendered(handle: Long, messages: ByteArray, tools: ByteArray?, options: ByteArray?): ByteArray

        @JvmStatic
        private external fun answered(
            handle: Long, prompt: ByteArray, isChat: Boolean, whole: LongArray, real: DoubleArray,
            stops: Array<ByteArray>, sink: Sink,
        ): Array<Any>
    }
}
