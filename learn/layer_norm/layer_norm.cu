// Rung 4 in CUDA C++: a warp for each row, loads of 16 bytes, the row in registers.  cuda_cpp.py
// builds it and calls it from JAX.  What Pallas did for us is now ours: which thread holds what, the
// shuffles of a row's sum, the checks of shapes, and the error if a launch fails.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

constexpr int kRows = 4;          // of a block: one for each of its four warps
constexpr int kVec = 8;           // neighbouring columns that a lane holds: 16 bytes of bfloat16
constexpr int kStep = 32 * kVec;  // columns of one load of a warp
constexpr int kMostChunks = 16;   // 4096 columns: 128 registers a lane for the row

// The sum over the 32 lanes, in every lane.  The order of the additions is fixed.
__device__ float warp_sum(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
  return x;
}

// kChunks is known to the compiler, because registers have no addresses: every loop must unroll.
template <int kChunks>
__global__ void __launch_bounds__(32 * kRows)
    forward(const uint4* __restrict__ x, const float4* __restrict__ weight,
            const float4* __restrict__ bias, uint4* __restrict__ y, long rows, long rows_of_weight,
            float eps) {
  const long row = long(blockIdx.x) * kRows + threadIdx.y;
  if (row >= rows) return;
  constexpr int kCols = kChunks * kStep;
  const long first = row * (kCols / kVec) + threadIdx.x;
  const long first_weight = row / rows_of_weight * (kCols / 4) + 2 * threadIdx.x;

  float data[kChunks][kVec];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const uint4 loaded = x[first + c * 32];
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&loaded);
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const float2 two = __bfloat1622float2(pairs[i]);
      data[c][2 * i] = two.x;
      data[c][2 * i + 1] = two.y;
    }
  }

  float sum = 0;
#pragma unroll
  for (int i = 0; i < kChunks * kVec; ++i) sum += data[i / kVec][i % kVec];
  const float mean = warp_sum(sum) / kCols;
  sum = 0;
#pragma unroll
  for (int i = 0; i < kChunks * kVec; ++i) {
    float& value = data[i / kVec][i % kVec];
    value -= mean;
    sum += value * value;
  }
  const float r = rsqrtf(warp_sum(sum) / kCols + eps);

#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint4 result;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&result);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long at = first_weight + c * (kStep / 4) + half;
      const float4 w = weight[at], b = bias[at];
      const float* d = &data[c][4 * half];
      pairs[2 * half] = __floats2bfloat162_rn(d[0] * r * w.x + b.x, d[1] * r * w.y + b.y);
      pairs[2 * half + 1] = __floats2bfloat162_rn(d[2] * r * w.z + b.z, d[3] * r * w.w + b.w);
    }
    y[first + c * 32] = result;
  }
}

// Finds the kernel for this number of chunks, from kChunks on, and launches it.
template <int kChunks, typename... Rest>
void launch(long chunks, cudaStream_t stream, long rows, Rest... arguments) {
  if (chunks == kChunks)
    forward<kChunks><<<(rows + kRows - 1) / kRows, dim3(32, kRows), 0, stream>>>(arguments...);
  else if constexpr (kChunks < kMostChunks)
    launch<kChunks + 1>(chunks, stream, rows, arguments...);
}

// XLA has checked dtypes and the number of arguments; shapes are ours to check.
ffi::Error layer_norm(cudaStream_t stream, float eps, ffi::Buffer<ffi::BF16> x,
                      ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> bias,
                      ffi::ResultBuffer<ffi::BF16> y) {
  const auto shape = x.dimensions();
  const long cols = shape.size() ? shape.back() : 0;
  if (cols == 0 || cols % kStep || cols > kMostChunks * kStep)
    return ffi::Error::InvalidArgument("cols=" + std::to_string(cols) + " is not a multiple of " +
                                       std::to_string(kStep) + " up to 4096");
  // Under vmap there is a weight for each element of the batch, thus for so many rows in turn.
  const long rows = x.element_count() / cols, weights = weight.element_count() / cols;
  if (rows == 0) return ffi::Error::Success();
  if (weights == 0 || rows % weights || bias.element_count() != weight.element_count() ||
      y->element_count() != x.element_count())
    return ffi::Error::InvalidArgument("weight, bias and y do not fit x of " +
                                       std::to_string(rows) + " x " + std::to_string(cols));
  launch<1>(cols / kStep, stream, rows, static_cast<const uint4*>(x.untyped_data()),
            static_cast<const float4*>(weight.untyped_data()),
            static_cast<const float4*>(bias.untyped_data()),
            static_cast<uint4*>(y->untyped_data()), rows, rows / weights, eps);
  const cudaError_t error = cudaGetLastError();  // of the launch; the kernel runs later
  return error ? ffi::Error::Internal(cudaGetErrorString(error)) : ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(LayerNorm, layer_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attr<float>("eps")
                                  .Arg<ffi::Buffer<ffi::BF16>>()    // x
                                  .Arg<ffi::Buffer<ffi::F32>>()     // weight
                                  .Arg<ffi::Buffer<ffi::F32>>()     // bias
                                  .Ret<ffi::Buffer<ffi::BF16>>(),   // y
                              {ffi::Traits::kCmdBufferCompatible});  // may be part of a CUDA graph
