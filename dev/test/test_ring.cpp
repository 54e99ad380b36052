// Tests attention in pieces on the CPU: how results merge, and chunks and rings against attention
// that was never split, in fp64. The ranks of a ring are threads.
//
// Run: ./dev/test_ring [part of a test's name]
#include "dev/common/ring_check.h"

namespace {

// A row that has been merged, or one to merge. `rest` is what rounding lse left out.
template <class A>
struct MergedRow {
    A o;
    A lse;
    A rest = 0;
    bool operator==(const MergedRow&) const = default;
};

template <class A = double>
MergedRow<A> merged(MergedRow<A> a, MergedRow<A> b) {
    const HeadsShape one{.B = 1, .T = 1, .heads = 1, .HS = 1};
    const auto piece = [&](MergedRow<A>& row) {
        return Partial<A>{
            .o = contiguous(&row.o, one), .lse = {&row.lse, 1}, .rest = {&row.rest, 1}};
    };
    const Partial<A> sum = piece(a);  // a view, through which merge() writes the result to a
    merge(Cpu(1), whole(1, 1, 1, 1), sum.o, sum, piece(b));
    return a;
}

}  // namespace

TEST(merge_of_two_pieces) {
    for (double x : {-3.0, 0.0, 2.5})
        for (double y : {-1.0, 0.5, 4.0}) {
            const double l_a = std::exp(x);
            const double l_b = std::exp(y);
            const double o = (7 * l_a - 2 * l_b) / (l_a + l_b);
            const double lse = std::log(l_a + l_b);

            // in both, lse and rest add up to x and to y
            const MergedRow<double> m = merged({7, x - 1, 1}, {-2, y + 2, -2});
            CHECK_NEAR(m.o, o, 1e-14);
            CHECK_NEAR(m.lse + m.rest, lse, 1e-14);

            const MergedRow<float> single = merged<float>({7, float(x)}, {-2, float(y)});
            const double both = double(single.lse) + single.rest;
            CHECK_NEAR(single.o, o, 1e-6);
            CHECK_NEAR(both, lse, 1e-7);
            CHECK(single.lse == float(both));
        }
}

TEST(merge_of_pieces_far_apart) {
    for (double far : {800.0, 1e5, 1e300}) {  // exp(far) is infinite
        CHECK((merged({7, far}, {-2, -far}) == MergedRow<double>{7, far}));
        CHECK((merged({7, -far}, {-2, far}) == MergedRow<double>{-2, far}));
    }
    CHECK((merged<float>({7, 90}, {-2, -90}) == MergedRow<float>{7, 90}));
}

TEST(merge_keeps_a_nan) {
    CHECK(std::isnan(merged({7, 1}, {NAN, 1}).o));
    CHECK(std::isnan(merged({NAN, 1}, {2, 1}).o));
    for (const MergedRow<double>& m : {merged({7, 1}, {2, NAN}), merged({7, NAN}, {2, 1})}) {
        CHECK(std::isnan(m.o));
        CHECK(std::isnan(m.lse));
    }
}

// What is scaled() has another scale than 1/√HS, here and below.
TEST(chunks_make_the_whole) {
    const Cpu cpu(1);
    const AttentionShape s = scaled(0.4f, whole(2, 37, 3, 16));
    const Whole<double, Cpu> causal(cpu, s, {.q_sigma = 4});
    const Whole<double, Cpu> full(cpu, unmasked(whole(1, 37, 1, 16)));
    for (const auto& [q_chunk, k_chunk] :
         {std::pair{37, 37}, {8, 8}, {5, 16}, {100, 1}, {1, 100}, {36, 2}, {9, 13}}) {
        check_chunks(causal, q_chunk, k_chunk);
        check_chunks(full, q_chunk, k_chunk);
    }
    check_chunks(Whole<float, Cpu>(cpu, s), 7, 10);
}

// With 8 ranks a chunk has 1, 2 and 9 tokens.
TEST(ring_equals_the_whole) {
    const Cpu cpu(1);
    for (int T : {16, 32, 144})
        check_local_rings<double>(cpu, scaled(0.3f, whole(2, T, 2, 20)), {});
    // one key has nearly all the weight
    check_local_rings<double>(cpu, whole(1, 48, 1, 64), {.q_sigma = 40});
    check_local_rings<float>(cpu, whole(1, 264, 2, 64), {.q_sigma = 5});
}

// The scale is so small that every key has some weight. So no single one decides the error.
TEST(ring_errors_do_not_grow) {
    constexpr int kSeeds = 5;
    check_local_rings<float>(Cpu(1), scaled(0.02f, whole(1, 256, 2, 32)), {}, kSeeds);
}

TEST_MAIN
