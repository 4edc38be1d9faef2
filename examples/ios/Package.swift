// swift-tools-version:5.9
import PackageDescription

// The branch is named after the version that manifest.json of your artifact lists under "tools".
let package = Package(
  name: "EdgekitChat",
  platforms: [.iOS(.v17), .macOS(.v14)],
  products: [.library(name: "EdgekitChat", targets: ["EdgekitChat"])],
  dependencies: [.package(url: "https://github.com/pytorch/executorch.git", branch: "swiftpm-1.5.1")],
  targets: [
    .target(
      name: "EdgekitChat",
      dependencies: [
        .product(name: "executorch", package: "executorch"),
        .product(name: "executorch_llm", package: "executorch"),
        .product(name: "backend_xnnpack", package: "executorch"),
        .product(name: "kernels_llm", package: "executorch"),
        .product(name: "kernels_optimized", package: "executorch"),
        .product(name: "kernels_quantized", package: "executorch"),
      ],
      // Kernels and backends register themselves when they are loaded, so the linker must keep them.
      linkerSettings: [.unsafeFlags(["-Wl,-all_load"])])
  ])
