#pragma once

#include <cstdint>

// The numbers of fields in onnx.proto, by the message that has them.
namespace edgekit::onnx {

constexpr uint32_t kModelGraph = 7, kModelOperators = 8, kOperatorsDomain = 1;
constexpr uint32_t kGraphNode = 1, kGraphTensor = 5, kGraphInput = 11, kGraphOutput = 12;
constexpr uint32_t kValueName = 1, kValueType = 2, kTypeTensor = 1, kTypeTensorNumber = 1;
constexpr uint32_t kNodeInput = 1, kNodeOutput = 2, kNodeName = 3, kNodeKind = 4, kNodeAttribute = 5, kNodeDomain = 7;
constexpr uint32_t kAttributeName = 1, kAttributeWhole = 3, kAttributeText = 4, kAttributeType = 20;
constexpr uint32_t kTensorDims = 1, kTensorType = 2, kTensorName = 8, kTensorBytes = 9, kTensorExternal = 13,
                   kTensorPlace = 14;
constexpr uint32_t kEntryKey = 1, kEntryValue = 2;

}  // namespace edgekit::onnx
