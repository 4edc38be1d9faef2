// A conversation with an artifact of edgekit, by ExecuTorch's own runner: its tokenizer, sampler and streaming.

import ExecuTorchLLM
import Foundation

/// `folder` holds model.pte, tokenizer.json and chat_format.json. Use it from one queue; only `stop` may be called from
/// another.
public final class ChatModel {
  private let format: ChatFormat
  private let runner: TextRunner
  private let system: String?
  private var hasBegun = false

  public init(folder: URL, system: String? = nil) throws {
    let json = try Data(contentsOf: folder.appendingPathComponent("chat_format.json"))
    format = try JSONDecoder().decode(ChatFormat.self, from: json)
    runner = TextRunner(
      modelPath: folder.appendingPathComponent("model.pte").path,
      tokenizerPath: folder.appendingPathComponent("tokenizer.json").path)
    self.system = system
  }

  /// Read the weights now, so that the first answer does not wait for them.
  public func load() throws { try runner.load() }

  /// Answer `question`; `onText` gets the text piece by piece.
  public func ask(_ question: String, maxTokens: Int, temperature: Double = 0.7, onText: @escaping (String) -> Void) throws {
    let prompt = hasBegun ? format.next(question: question) : try format.begin(system: system, question: question)
    hasBegun = true
    let config = Config {
      $0.isEchoEnabled = false
      $0.maximumNewTokens = maxTokens
      $0.temperature = temperature
    }
    try runner.generate(prompt, config, tokenCallback: onText)
  }

  public func stop() { runner.stop() }

  /// Forget the conversation. Call it from `didReceiveMemoryWarning`, or release the model.
  public func reset() {
    runner.reset()
    hasBegun = false
  }
}
