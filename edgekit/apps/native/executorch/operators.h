// The two operators of ExecuTorch's llama library that `forward` calls, where the build that is linked lacks them.
#pragma once

// Register what nobody else has registered. ExecuTorch's own kernels, where they are linked, always win.
void add_missing_operators();

bool own_operators_are_used();
