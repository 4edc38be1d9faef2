// Logarithm and exponential with the same bits on every processor and in Python, which those of C libraries lack.
#pragma once

namespace edgekit {

double portable_log(double value);  // of a positive number that is neither subnormal nor infinite
double portable_exp(double value);  // of a number that is 0 or less

}  // namespace edgekit
