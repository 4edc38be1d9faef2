// The smallest use of an edgekit artifact in an iOS or macOS app: one .pte, one conversation, greedy choice.
//
// Written against the documented API of ExecuTorch's Swift package. NOT COMPILED OR RUN by edgekit's tests: there is no
// Xcode where they run. The same calls, with the same inputs, are tested there from Python.
//
// Package.swift:  .package(url: "https://github.com/pytorch/executorch.git", branch: "swiftpm-<version>")
// with the products executorch, backend_xnnpack (or backend_coreml), kernels_optimized, kernels_quantized and
// kernels_llm, and the linker flag -Wl,-all_load (or -force_load for each), so that kernels register themselves.

import ExecuTorch

/// A loaded program. Not thread-safe: use it from one queue.
final class EdgekitModel {
  enum Failure: Error { case doesNotFit(held: Int, more: Int, slots: Int), noTokens, noLogits }

  let slots: Int
  let chunk: Int
  let endsOfText: Set<Int>
  private let module: Module

  /// Tokens that the cache holds.
  private(set) var held = 0

  init(path: String) throws {
    module = Module(filePath: path)
    slots = try module.execute("get_max_context_len")
    chunk = try module.execute("get_max_seq_len")
    let ends: [Value] = try module.execute("get_eos_ids", [])
    endsOfText = Set(try ends.map { try Int($0) })
  }

  /// Append `tokens`; the logits after the last of them.
  func feed(_ tokens: [Int]) throws -> [Float] {
    guard !tokens.isEmpty else { throw Failure.noTokens }
    guard held + tokens.count <= slots else {
      throw Failure.doesNotFit(held: held, more: tokens.count, slots: slots)
    }
    var logits: [Float] = []
    for start in stride(from: 0, to: tokens.count, by: chunk) {
      let piece = tokens[start..<min(start + chunk, tokens.count)].map(Int64.init)
      let values: [Value] = try module.execute("forward", [
        Tensor<Int64>(piece, shape: [1, piece.count]),
        Tensor<Int64>([Int64(held)], shape: [1]),
      ])
      guard let row: Tensor<Float> = values.first?.tensor() else { throw Failure.noLogits }
      logits = row.scalars()
      held += piece.count
    }
    return logits
  }

  /// Go on after `prompt`, telling each token as it comes; stop where `onToken` says false.
  func generate(prompt: [Int], limit: Int, onToken: (Int) -> Bool) throws {
    var logits = try feed(prompt)
    for _ in 0..<limit {
      let token = logits.indices.max { logits[$0] < logits[$1] }!
      if endsOfText.contains(token) || !onToken(token) || held == slots { return }
      logits = try feed([token])
    }
  }

  /// Forget the newest `count` tokens, for another answer to the same prompt.
  func rewind(_ count: Int) {
    precondition((0...held).contains(count), "cannot forget \(count) of \(held) tokens")
    held -= count
  }
}
