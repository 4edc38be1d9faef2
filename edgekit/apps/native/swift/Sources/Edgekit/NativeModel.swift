import CEdgekit
import Foundation

/// An artifact of the onnx target, opened by edgekit's native library.
///
/// It answers one request at a time; a second one is refused until the first has ended. Any thread may call it.
public final class NativeModel: @unchecked Sendable {
  /// An error in one line.
  public struct Failed: Error, CustomStringConvertible {
    public let description: String
  }

  /// Options of an answer; the defaults are greedy, without a limit.
  public struct Options: Sendable {
    public var maxTokens: Int64 = -1
    public var temperature = 0.0
    public var topK: Int64 = 0
    public var topP = 1.0
    public var minP = 0.0
    public var typicalP = 1.0
    public var repetitionPenalty = 1.0
    public var presencePenalty = 0.0
    public var frequencyPenalty = 0.0
    public var seed: UInt64 = 0
    public var stops: [String] = []
    public var ignoresEnds = false
    public var reusesPrefix = false
    public var draftTokens: Int64 = 0

    public init() {}
  }

  public enum Reason: Sendable {
    case stopped, outOfLength, cancelled
  }

  public struct Answer: Sendable {
    public let text: String
    public let tokens: [Int32]
    public let reason: Reason
    public let promptTokens, cachedTokens, draftedTokens, acceptedTokens: Int
    public let prefillSeconds, decodeSeconds: Double
  }

  /// Bytes; nil where the system does not count them.
  public struct Memory: Sendable {
    /// Resident pages of mapped files, which the system may drop.
    public let weights: Int64?
    /// Private: what opening took, with weights that the runtime packed.
    public let engine: Int64?
    /// Keys and values, once the cache is full.
    public let cache: Int64?
    public let cacheUsed: Int64?
    /// Private: what was taken since the model was opened, without the cache.
    public let activations: Int64?
    /// Of the whole process: the footprint by which the system ends an app.
    public let processPrivate: Int64?
    /// Resident in the whole process at once, files included.
    public let processPeak: Int64?
  }

  private let model: OpaquePointer
  private let busy = NSLock()

  /// Open the artifact in `folder`; every file is compared with the hashes of its manifest.
  ///
  /// - Parameters:
  ///   - onnxRuntime: the file of ONNX Runtime's library; nil: where the system finds it.
  ///   - threads: 0: as planned, within the cores that the process may use.
  ///   - exact: a text does not depend on drafts and reused prefixes.
  ///   - packed: a folder that `pack` made on this device; nil: weights are packed into private memory.
  /// - Throws: `Failed` where the artifact is damaged or not supported.
  public init(
    folder: String, onnxRuntime: String? = nil, threads: Int32 = 0, exact: Bool = false, packed: String? = nil
  ) throws {
    let library = copied(onnxRuntime), weights = copied(packed)
    defer { [library, weights].forEach { free($0) } }
    guard let opened = edgekit_open(folder, library, threads, exact ? 1 : 0, weights) else { throw lastFailure() }
    model = opened
  }

  deinit { edgekit_close(model) }

  /// Compare every file of an artifact of any target with its manifest.
  public static func verify(folder: String) throws {
    if edgekit_verify(folder) != 0 { throw lastFailure() }
  }

  /// Pack the weights of an artifact for this device into `packed`, a folder that nothing else uses, unless that was
  /// done before: openings with it map them. Takes as much private memory as an opening without.
  public static func pack(folder: String, onnxRuntime: String? = nil, packed: String) throws {
    let library = copied(onnxRuntime)
    defer { free(library) }
    if edgekit_pack(folder, library, packed) != 0 { throw lastFailure() }
  }

  /// Measure the model's memory now; takes milliseconds.
  public func memory() throws -> Memory {
    try alone {
      var found = edgekit_memory()
      if edgekit_memory_of(model, &found) != 0 { throw lastFailure() }
      return Memory(found)
    }
  }

  /// The prompt of a chat by the model's own template. Arguments are JSON: a list of messages, of tools, an object.
  public func render(messages: String, tools: String? = nil, options: String? = nil) throws -> String {
    try alone {
      let texts = [messages, tools, options].map(copied)
      defer { texts.forEach { free($0) } }
      var chat = edgekit_chat(
        messages: texts[0], tools: texts[1], options: texts[2], adds_generation_prompt: 1)
      let prompt = try filled(4096) { edgekit_render(edgekit_template_of(model), &chat, $0, $1) } as [CChar]
      return prompt.withUnsafeBytes { String(decoding: $0, as: UTF8.self) }
    }
  }

  /// Answer a text, or with `isChat` one that `render` returned.
  ///
  /// `onText` gets each piece of text as it is decided, on this thread; what it throws ends the answer and is thrown
  /// here.
  public func generate(
    _ prompt: String, options: Options = Options(), isChat: Bool = false,
    onText: @escaping (String) throws -> Void = { _ in }
  ) throws -> Answer {
    try alone {
      let text = prompt.utf8.map(CChar.init(bitPattern:))
      let tokens: [Int32] = try filled(text.count + 64) {
        edgekit_encode(edgekit_tokenizer_of(model), text, text.count, isChat ? 0 : 1, $0, $1)
      }
      let listener = Listener(model, onText)
      let ends = options.stops.map(copied)
      defer { ends.forEach { free($0) } }
      var answer = edgekit_answer()
      let failed = ends.map { UnsafePointer($0) }.withUnsafeBufferPointer { stops in
        var asked = native(options)
        asked.begins_text = isChat ? 1 : 0
        asked.stops = stops.baseAddress
        asked.stop_count = stops.count
        asked.on_text = Listener.onText
        asked.context = Unmanaged.passUnretained(listener).toOpaque()
        return withExtendedLifetime(listener) { edgekit_generate(model, tokens, tokens.count, &asked, &answer) }
      }
      if let error = listener.error { throw error }
      if failed != 0 { throw lastFailure() }
      return Answer(answer)
    }
  }

  /// The pieces of an answer as they are decided, computed on a thread of their own. Ending the loop ends the answer.
  public func stream(_ prompt: String, options: Options = Options(), isChat: Bool = false)
    -> AsyncThrowingStream<String, Error>
  {
    AsyncThrowingStream { pieces in
      pieces.onTermination = { if case .cancelled = $0 { self.cancel() } }
      Thread.detachNewThread {
        do {
          _ = try self.generate(prompt, options: options, isChat: isChat) {
            if case .terminated = pieces.yield($0) { throw CancellationError() }
          }
          pieces.finish()
        } catch {
          pieces.finish(throwing: error)
        }
      }
    }
  }

  /// End the answer that is being generated.
  public func cancel() { edgekit_cancel(model) }

  private func alone<Result>(_ body: () throws -> Result) throws -> Result {
    guard busy.try() else { throw Failed(description: "this model is answering another request; wait, or open it twice") }
    defer { busy.unlock() }
    return try body()
  }
}

/// Hands pieces of text to the app until that throws.
private final class Listener {
  private let model: OpaquePointer
  private let body: (String) throws -> Void
  private(set) var error: Error?

  init(_ model: OpaquePointer, _ body: @escaping (String) throws -> Void) {
    self.model = model
    self.body = body
  }

  static let onText: @convention(c) (UnsafeMutableRawPointer?, UnsafePointer<CChar>?, Int) -> Void = {
    let listener = Unmanaged<Listener>.fromOpaque($0!).takeUnretainedValue()
    guard listener.error == nil else { return }
    do {
      try listener.body(String(decoding: UnsafeRawBufferPointer(start: $1, count: $2), as: UTF8.self))
    } catch {
      listener.error = error
      edgekit_cancel(listener.model)
    }
  }
}

extension NativeModel.Answer {
  fileprivate init(_ answer: edgekit_answer) {
    text = String(decoding: UnsafeRawBufferPointer(start: answer.text, count: answer.bytes), as: UTF8.self)
    tokens = Array(UnsafeBufferPointer(start: answer.tokens, count: answer.count))
    switch answer.reason {
    case edgekit_stopped: reason = .stopped
    case edgekit_cancelled: reason = .cancelled
    default: reason = .outOfLength
    }
    promptTokens = answer.prompt_tokens
    cachedTokens = answer.cached_tokens
    draftedTokens = answer.drafted_tokens
    acceptedTokens = answer.accepted_tokens
    prefillSeconds = answer.prefill_s
    decodeSeconds = answer.decode_s
  }
}

extension NativeModel.Memory {
  fileprivate init(_ found: edgekit_memory) {
    func counted(_ bytes: Int64) -> Int64? { bytes < 0 ? nil : bytes }
    weights = counted(found.weights)
    engine = counted(found.engine)
    cache = counted(found.cache)
    cacheUsed = counted(found.cache_used)
    activations = counted(found.activations)
    processPrivate = counted(found.process_private)
    processPeak = counted(found.process_peak)
  }
}

private func native(_ options: NativeModel.Options) -> edgekit_options {
  var asked = edgekit_default_options()
  asked.max_tokens = options.maxTokens
  asked.ignores_ends = options.ignoresEnds ? 1 : 0
  asked.reuses_prefix = options.reusesPrefix ? 1 : 0
  asked.draft_tokens = options.draftTokens
  asked.temperature = options.temperature
  asked.top_k = options.topK
  asked.top_p = options.topP
  asked.min_p = options.minP
  asked.typical_p = options.typicalP
  asked.repetition_penalty = options.repetitionPenalty
  asked.presence_penalty = options.presencePenalty
  asked.frequency_penalty = options.frequencyPenalty
  asked.seed = options.seed
  return asked
}

/// What `write` returns in whole; it says how many elements there are, and writes as many as the buffer can hold.
private func filled<Element: Numeric>(
  _ guess: Int, _ write: (UnsafeMutablePointer<Element>, Int) -> Int64
) throws -> [Element] {
  var buffer = [Element](repeating: 0, count: guess)
  while true {
    let count = buffer.withUnsafeMutableBufferPointer { Int(write($0.baseAddress!, $0.count)) }
    if count < 0 { throw lastFailure() }
    if count <= buffer.count { return Array(buffer.prefix(count)) }
    buffer = [Element](repeating: 0, count: count)
  }
}

/// A copy in C's form, for `free`.
private func copied(_ text: String?) -> UnsafeMutablePointer<CChar>? { text.flatMap { strdup($0) } }

private func lastFailure() -> NativeModel.Failed { NativeModel.Failed(description: String(cString: edgekit_last_error())) }
