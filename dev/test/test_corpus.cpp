// The built-in corpus: is its grammar read rightly, its floor exact, its text always the same?
// Run: ./dev/test_corpus
#include <cctype>
#include <future>
#include <map>
#include <unordered_set>

#include "data/corpus.h"
#include "data/file.h"
#include "data/grammar.h"
#include "data/tokenizer.h"
#include "dev/test/program.h"

namespace {

// Choices are told without the help of capitals.
std::string lower(std::string s) {
    for (char& c : s)
        c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return s;
}

// Finds every derivation of a text: what each choice may have been, and −log of all choices'
// probability.
struct Search {
    const Grammar& g;
    const std::string text;
    std::vector<double> nats = {};  // of each derivation

    using Memory = std::map<int, std::pair<const Alternative*, std::string>>;
    using Then = std::function<void(size_t at, const Memory&, double spent)>;

    Search(const Grammar& g, const std::string& text) : g(g), text(lower(text)) {
        const auto end = [&](size_t at, const Memory&, double spent) {
            if (at == this->text.size())
                nats.push_back(spent);
        };
        read({{.kind = Symbol::choose, .rule = g.rule("story")}}, 0, 0, {}, 0, end);
    }
    // Reads symbol i of t and those behind it. Each way to do so goes on with `then`.
    void read(const Template& t, size_t i, size_t at, const Memory& memory, double spent,
              const Then& then) {
        if (i == t.size())
            return then(at, memory, spent);
        const Symbol& s = t[i];
        const Then rest = [&](size_t at, const Memory& memory, double spent) {
            read(t, i + 1, at, memory, spent, then);
        };
        if (s.article)
            at += text[at] == 'n' ? 2 : 1;
        const std::string& literal =
            s.kind == Symbol::repeat ? memory.at(s.variable).second : s.literal;
        if (s.kind == Symbol::text || s.kind == Symbol::repeat) {
            if (text.compare(at, literal.size(), literal) == 0)
                rest(at + literal.size(), memory, spent);
            return;
        }
        if (s.kind == Symbol::recall)
            return read(memory.at(s.variable).first->columns[s.column], 0, at, memory, spent, rest);
        const auto weight = [&](const Alternative& a) {
            for (const int other : s.others)
                if (memory.at(other).first == &a)
                    return 0.0;
            return static_cast<double>(a.weight);
        };
        double total = 0;
        for (const Alternative& a : g.rules[s.rule].alternatives)
            total += weight(a);
        for (const Alternative& a : g.rules[s.rule].alternatives) {
            const Then remember = [&](size_t end, const Memory& memory, double spent) {
                Memory more = memory;
                more[s.variable] = {&a, text.substr(at, end - at)};
                rest(end, more, spent);
            };
            if (weight(a) == 0)
                continue;
            read(a.columns[s.column], 0, at, memory, spent - std::log(weight(a) / total),
                 s.variable < 0 ? rest : remember);
        }
    }
};

}  // namespace

// Every form of the notation. Each text comes as often as its choices say, and for some as a
// calculation by hand does.
TEST(notation_and_probabilities) {
    const std::string source = R"(
@rule story
3 {hero:person} ate a {fruit}. {Hero.he} [25% never ](slept|sang).
1 {hero:person} met {friend:person!hero} ¶
  and {friend} met {hero.him}. {Fruit}!
@table person: name, he, him
Ann / Eve | she | her
Tom | he | him
@list fruit
apple, pear(|, cut)
)";
    const Grammar g(source);
    const Grammar small(lower(source));
    std::map<std::string, int> count;
    const int n = 50000;
    for (int i = 0; i < n; i++)
        count[g.write(g.rule("story"), 1, i)]++;
    std::map<std::string, double> probability;
    for (const auto& [text, times] : count) {
        const std::vector<double> nats = Search(small, text).nats;
        CHECK(nats.size() == 1);
        const double p = probability[text] = std::exp(-nats.at(0));
        CHECK_NEAR(times, n * p, 5 * std::sqrt(n * p));
    }
    CHECK_NEAR(probability["Eve ate an apple. She never sang."], 0.75 / 3 / 2 * 0.25 / 2, 1e-12);
    CHECK_NEAR(probability["Tom ate a pear. He slept."], 0.75 / 3 / 2 / 2 * 0.75 / 2, 1e-12);
    CHECK_NEAR(probability["Ann met Tom\nand Tom met her. Pear, cut!"], 0.25 / 3 / 2 / 2 / 2,
               1e-12);
}

// The floor is exact if each story has one derivation. The grammar is read from the file itself,
// because an object with an old copy of it writes stories that this grammar cannot.
TEST(corpus_and_its_floor) {
    auto other = std::async(std::launch::async, [] { return &builtin_corpus(); });
    const Corpus& corpus = builtin_corpus();
    CHECK(other.get() == &corpus);
    const Grammar stories(lower(read_file("data/stories.txt")));
    int number = 0;  // of a story
    double nats = 0;
    std::unordered_set<std::string> seen;
    for (const auto& [tokens, end] : {std::pair{&corpus.val, 1100}, {&corpus.train, 32100}}) {
        std::vector<uint16_t> expected;
        for (; number < end; number++) {
            const std::string story = write_story(1, number);
            const std::vector<int> bytes = encode_bytes(story);
            expected.push_back(kEndOfText);
            expected.insert(expected.end(), bytes.begin(), bytes.end());
            CHECK(seen.insert(story).second);  // in one split only, and once
            CHECK(story.find_first_of("{}()[]|") > story.size() && story.find("  ") > story.size());
            if (tokens != &corpus.val)
                continue;
            const Search search(stories, story);
            CHECK(search.nats.size() == 1);
            for (const double one : search.nats)
                nats += one;
        }
        CHECK(*tokens == expected);
    }
    CHECK_NEAR(corpus.val_nats, nats / static_cast<double>(corpus.val.size()), 1e-12);
    // They are the same on every machine. The checksums are those of shards with these tokens.
    for (const auto& [tokens, checksum] :
         {std::pair{&corpus.val, 0x8c77f048a27d775fu}, {&corpus.train, 0x1fbde22c378e520du}}) {
        const std::string shard = header_of({20240520, 1, int(tokens->size())}) + bytes_of(*tokens);
        CHECK(checksum64(shard.data(), shard.size()) == checksum);
    }
}

TEST_MAIN
