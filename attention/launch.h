// What the flash kernels share around their loops: their arguments, the tile that a block works on,
// and how they are launched. Calls have been checked before (check_call in call.h).
#pragma once
#include <climits>

#include "attention/attention.h"

// How many tiles of b cover a ≥ 0.
constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}
// The same in a kernel, where the compiler has to know b early.
template <int b>
__host__ __device__ constexpr int ceil_div(int a) {
    return (a + b - 1) / b;
}

// -------------------------------------------------------------------------------------------------
// Arguments

// A kernel's arguments: the call, and what follows from its shape. Backward's have more.
template <class Call>
struct CallArgs : Call {
    int heads = this->s.B * this->s.NH;
    int shift = this->s.shift();  // query i sees keys j ≤ i + shift
    float scale = this->s.resolved_scale();
    float scale_log2 = this->s.scale_log2();  // for exponentials that are powers of 2
};

// What backward knows of a query.
struct alignas(8) LseD {
    float lse_log2;  // log2(e)·lse
    float D;
};
// The same of a lane's two queries in a fragment whose columns are queries, as dkdv_kernel has
// them. Element e of the fragment (fragments.cuh) belongs to columns[e % 2].
struct alignas(16) LseDPair {
    LseD columns[2];
};

// Query i sees keys [0, visible_keys). Without a mask `shift` is Tk, so these are all keys.
__device__ __forceinline__ int visible_keys(int query, int Tk, int shift) {
    return min(Tk, query + shift + 1);
}

// -------------------------------------------------------------------------------------------------
// What a block works on

// A tile of one head's queries or keys.
struct WorkTile {
    int tile;
    int bh;  // b·NH + h
    int b;
    int h;

    // The head's first row of HS elements. The others are x.token_stride apart. A kernel with no
    // register to spare may have an Offset of 32 bits.
    template <int HS, class Offset = size_t, class X>
    __device__ __forceinline__ X* head(const HeadsView<X>& x) const {
        return x.ptr + b * x.batch_stride + static_cast<Offset>(h) * HS;
    }
    // The head's row statistics, by token.
    template <class A>
    __device__ __forceinline__ A* stats(const RowStatsView<A>& x) const {
        return x.ptr + bh * x.head_stride;
    }
};

// Under a causal mask the last queries see the most keys, and the first keys are seen by the most
// queries. The longest tiles come first, so that the last blocks to finish have little to do: tiles
// of queries are worked on from the last to the first, tiles of keys from the first to the last.
enum class TileOrder { first_to_last, last_to_first };

// The first `heads` blocks work on the first tile of each head, the next on the second, and so on,
// where `order` says which end is first.
__device__ __forceinline__ WorkTile work_tile(int heads, int NH, TileOrder order) {
    const int nth = blockIdx.x / heads;  // of the head's tiles, in `order`
    const int tiles = gridDim.x / heads;
    const int bh = blockIdx.x % heads;
    const int b = bh / NH;
    const int h = bh % NH;
    const int tile = order == TileOrder::last_to_first ? tiles - 1 - nth : nth;
    return {.tile = tile, .bh = bh, .b = b, .h = h};
}

// -------------------------------------------------------------------------------------------------
// Launches

// How many blocks a launch needs so that each tile of each head has one.
inline unsigned count_blocks(const char* name, int tiles, int heads) {
    const size_t blocks = static_cast<size_t>(tiles) * heads;
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu blocks are more than a grid can have (%d); use a smaller batch",
                           name, blocks, INT_MAX));
    return static_cast<unsigned>(blocks);
}

// Calls f(std::integral_constant<int, HS>), so that the head size is known to the compiler.
template <class F>
void with_head_size(int HS, F f) {
    if (HS == 64)
        f(std::integral_constant<int, 64>{});
    else
        f(std::integral_constant<int, 128>{});
}
