// swift-tools-version:5.9
import PackageDescription

// The linker needs edgekit's native library, which CMake builds (docs/native.md).
let package = Package(
  name: "Edgekit",
  platforms: [.iOS(.v17), .macOS(.v14)],
  products: [.library(name: "Edgekit", targets: ["Edgekit"])],
  targets: [
    .systemLibrary(name: "CEdgekit"),
    // iOS links the static library, which needs C++'s own.
    .target(
      name: "Edgekit", dependencies: ["CEdgekit"],
      linkerSettings: [.linkedLibrary("c++", .when(platforms: [.iOS, .macOS]))]),
  ])
