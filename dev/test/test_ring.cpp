// Tests attention in pieces on the CPU. It checks how results merge, and chunks and rings against
// attention that was never split, in fp64. The ranks of a ring are threads.
//
// Run: ./dev/test_ring [part of a test's name]
#include "dev/common/ring_check.h"

namespace {

AttentionShape whole(int B, int T, int NH, int HS, bool causal = true, float scale = 0.f) {
    return {.B = B, .Tq = T, .Tk = T, .NH = NH, .HS = HS, .causal = causal, .scale = scale};
}

// o, lse and lse's rest after a merge of two rows.
template <class A = double>
std::array<A, 3> merged(A o, A lse, A o_b, A lse_b, A rest = 0, A rest_b = 0) {
    const HeadsShape one{.B = 1, .T = 1, .heads = 1, .HS = 1};
    const Piece<A> sum{.o = contiguous(&o, one), .lse = {&lse, 1}, .rest = {&rest, 1}};
    const Piece<A> piece{.o = contiguous(&o_b, one), .lse = {&lse_b, 1}, .rest = {&rest_b, 1}};
    merge(Cpu(1), whole(1, 1, 1, 1), sum.o, sum, piece);
    return {o, lse, rest};
}

}  // namespace

TEST(merge_of_two_pieces) {
    for (double x : {-3.0, 0.0, 2.5})
        for (double y : {-1.0, 0.5, 4.0}) {
            const double l = std::exp(x);
            const double l_b = std::exp(y);
            const auto [o, lse, rest] = merged(7., x - 1, -2., y + 2, 1., -2.);  // the rests count
            CHECK_NEAR(o, (7 * l - 2 * l_b) / (l + l_b), 1e-14);
            CHECK_NEAR(lse + rest, std::log(l + l_b), 1e-14);
            const auto [o32, lse32, rest32] = merged<float>(7, x, -2, y);
            CHECK_NEAR(o32, (7 * l - 2 * l_b) / (l + l_b), 1e-6);
            CHECK_NEAR(double(lse32) + rest32, std::log(l + l_b), 1e-7);
            CHECK(lse32 == float(double(lse32) + rest32));
        }
    for (double far : {800.0, 1e5, 1e300}) {  // exp of it is infinite
        CHECK((merged(7., far, -2., -far) == std::array{7., far, 0.}));
        CHECK((merged(7., -far, -2., far) == std::array{-2., far, 0.}));
    }
    CHECK((merged(7.f, 90.f, -2.f, -90.f) == std::array{7.f, 90.f, 0.f}));
    // a NaN stays
    CHECK(std::isnan(merged<double>(7, 1, NAN, 1)[0]) &&
          std::isnan(merged<double>(NAN, 1, 2, 1)[0]));
    for (const auto& r : {merged<double>(7, 1, 2, NAN), merged<double>(7, NAN, 2, 1)})
        CHECK(std::isnan(r[0]) && std::isnan(r[1]));
}

// The scale is not 1/√HS, here and below.
TEST(chunks_make_the_whole) {
    const Cpu cpu(1);
    const AttentionShape s = whole(2, 37, 3, 16, true, 0.4f);
    const Whole<double, Cpu> masked(cpu, s, 4);
    const Whole<double, Cpu> unmasked(cpu, whole(1, 37, 1, 16, false));
    for (const auto& [q_chunk, k_chunk] :
         {std::pair{37, 37}, {8, 8}, {5, 16}, {100, 1}, {1, 100}, {36, 2}, {9, 13}}) {
        check_chunks(masked, q_chunk, k_chunk);
        check_chunks(unmasked, q_chunk, k_chunk);
    }
    check_chunks(Whole<float, Cpu>(cpu, s), 7, 10);
}

// 8 ranks have chunks of a token, of 2 and of 9.
TEST(ring_equals_the_whole) {
    const Cpu cpu(1);
    for (int T : {16, 32, 144})
        check_local_rings<double>(cpu, whole(2, T, 2, 20, true, 0.3f), 1, 1);
    // One key has nearly all the weight.
    check_local_rings<double>(cpu, whole(1, 48, 1, 64), 40, 1);
    check_local_rings<float>(cpu, whole(1, 264, 2, 64), 5, 1);
}
TEST(ring_errors_do_not_grow) {
    // With long sums one key's error does not decide.
    check_local_rings<float>(Cpu(1), whole(1, 256, 2, 32, true, 0.02f), 1, 1, 5);
}

TEST_MAIN
