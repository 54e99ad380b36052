// The built-in corpus: is its entropy exact, its grammar unambiguous, its English in order, its cache safe?
//
// The grammar is examined twice. Statically: every choice point of the notation is proved to be readable from the left.
// Dynamically: a scorer that knows the grammar but not the choices looks for every derivation of a text.
//
// Run: ./dev/test_corpus
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <unordered_set>

#include "data/corpus.h"
#include "data/grammar.h"
#include "data/tokenizer.h"
#include "dev/test.h"

namespace {

// Of stories 0 … 999. It changes with the grammar; if it changes with grammar.cpp alone, raise kFormat in corpus.cpp.
constexpr unsigned long long kStoriesHash = 0xe090662eadeefcb0;

// Read from the file, not from the program: a program with an old copy writes stories that this grammar cannot.
const Grammar& grammar() {
    static std::ifstream file("data/stories.txt");
    static const Grammar g(std::string(std::istreambuf_iterator<char>(file), {}));
    return g;
}
bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c));
}
char upper(char c) {
    return static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
}

// ---- What is still to be written: a linked list of symbols, shared between the branches of a search.
struct Todo {
    const Symbol* symbol;  // null: end of the binding of `variable` to `row`, whose text started at `start`
    const Todo* next;
    int variable = -1;
    const Alternative* row = nullptr;
    size_t start = 0;  // of a literal: how much of it is written
};
struct Arena {
    std::deque<Todo> todos;
    std::deque<Symbol> symbols;
    const Todo* push(const Template& t, const Todo* next, size_t from = 0) {
        for (size_t i = t.size(); i-- > from;) next = push({&t[i], next});
        return next;
    }
    const Todo* push(Todo todo) { return &todos.emplace_back(todo); }
    const Symbol* text(std::string literal) { return &symbols.emplace_back(Symbol{Symbol::text, std::move(literal)}); }
};

// ================================================================ The scorer: all derivations of a text

struct Scorer {
    struct Memory {  // an environment, newest binding first
        int variable;
        const Alternative* row;
        std::string text;
        const Memory* next;
    };
    const Grammar& g;
    const std::string& text;
    int derivations = 0;
    double nats = 0;
    Arena arena;
    std::deque<Memory> memories;

    Scorer(const Grammar& g, int rule, const std::string& text) : g(g), text(text) {
        Symbol root{Symbol::choose, ""};
        root.rule = rule;
        walk(0, arena.push({root}, nullptr), nullptr, false, false, 0);
    }
    static const Memory& lookup(const Memory* m, int variable) {
        while (m->variable != variable) m = m->next;
        return *m;
    }
    void walk(size_t at, const Todo* todo, const Memory* memory, bool article, bool capital, double spent) {
        for (;;) {
            if (!todo) {
                if (at == text.size()) derivations++, nats = spent;
                return;
            }
            const Todo& t = *todo;
            todo = t.next;
            if (!t.symbol) {
                memory = &memories.emplace_back(Memory{t.variable, t.row, text.substr(t.start, at - t.start), memory});
                continue;
            }
            const Symbol& s = *t.symbol;
            article |= s.article;
            capital |= s.capital;
            if (s.kind == Symbol::text || s.kind == Symbol::again) {
                std::string expected = s.kind == Symbol::text ? s.literal : lookup(memory, s.variable).text;
                if (expected.empty()) continue;
                if (capital) expected[0] = upper(expected[0]);
                if (article) expected = (starts_with_vowel(expected[0]) ? "n " : " ") + expected;
                article = capital = false;
                if (text.compare(at, expected.size(), expected) != 0) return;
                at += expected.size();
            } else if (s.kind == Symbol::recall) {
                todo = arena.push(lookup(memory, s.variable).row->columns[s.column], todo);
            } else {
                std::vector<const Alternative*> open;
                double total = 0;
                for (const Alternative& a : g.rules[s.rule].alternatives) {
                    bool excluded = false;
                    for (int other : s.others) excluded |= lookup(memory, other).row == &a;
                    if (excluded) continue;
                    open.push_back(&a);
                    total += static_cast<double>(a.weight);
                }
                for (const Alternative* a : open) {
                    // The article is written before the binding starts, so it is consumed here.
                    for (const char* joint : {"n ", " "}) {
                        size_t from = at;
                        bool pending = article;
                        if (s.variable >= 0 && article) {
                            const size_t n = std::strlen(joint);
                            const bool vowel = at + n < text.size() && starts_with_vowel(text[at + n]);
                            if (text.compare(at, n, joint) != 0 || vowel != (n == 2)) continue;
                            from += n;
                            pending = false;
                        } else if (joint[0] == ' ') {
                            continue;
                        }
                        const Template& t = a->columns[s.column];
                        if (!pending && !capital && !t.empty() && t[0].kind == Symbol::text &&
                            text.compare(from, t[0].literal.size(), t[0].literal) != 0)
                            continue;  // as the next step would find
                        const Todo* then = s.variable < 0 ? todo : arena.push({nullptr, todo, s.variable, a, from});
                        walk(from, arena.push(t, then), memory, pending, capital,
                             spent + std::log(total) - std::log(static_cast<double>(a->weight)));
                    }
                }
                return;
            }
        }
    }
};

// ================================================================ The static check

// Can two continuations write texts of which one begins the other? Rows that a later slot recalls are taken to be any
// row, so "no" is a proof and "yes" a suspicion.
struct Prover {
    struct Side {
        const Todo* todo;
        bool article = false, capital = false;
    };
    const Grammar& g;
    Arena arena;
    std::set<std::pair<int, int>> distinct;  // variables that never remember the same row
    std::string common;                      // what both have written, for the report
    bool quiet = false;

    explicit Prover(const Grammar& g) : g(g) {
        for (const Rule& rule : g.rules)
            for (const Alternative& a : rule.alternatives)
                for (const Template& t : a.columns)
                    for (const Symbol& s : t)
                        for (int other : s.others)
                            distinct.insert({s.variable, other}), distinct.insert({other, s.variable});
    }
    bool may_be_empty(int rule) const {
        for (const Alternative& a : g.rules[rule].alternatives)
            if (a.columns[0].empty()) return true;
        return false;
    }
    // The templates that a symbol may write.
    std::vector<const Template*> templates(const Symbol& s) const {
        std::vector<const Template*> all;
        for (const Alternative& a : g.rules[s.rule].alternatives)
            for (size_t c = 0; c < a.columns.size(); c++)
                if (s.kind == Symbol::again ? bound_columns(s.variable).count(static_cast<int>(c))
                                            : static_cast<int>(c) == s.column)
                    all.push_back(&a.columns[c]);
        return all;
    }
    // Columns with which a variable is bound.
    const std::set<int>& bound_columns(int variable) const {
        static std::map<int, std::set<int>> columns;
        if (columns.empty())
            for (const Rule& rule : g.rules)
                for (const Alternative& a : rule.alternatives)
                    for (const Template& t : a.columns)
                        for (const Symbol& s : t)
                            if (s.kind == Symbol::choose && s.variable >= 0) columns[s.variable].insert(s.column);
        return columns[variable];
    }
    // All first characters with what follows them. An ended side is character 0.
    std::vector<std::pair<char, Side>> steps(Side side) {
        std::vector<std::pair<char, Side>> all;
        if (!side.todo) return {{'\0', side}};
        const Symbol& s = *side.todo->symbol;
        const Todo* next = side.todo->next;
        side.article |= s.article;
        side.capital |= s.capital;
        if (s.kind == Symbol::text) {
            const size_t at = side.todo->start;
            const char first = side.capital ? upper(s.literal[at]) : s.literal[at];
            const Todo* after =
                at + 1 < s.literal.size() ? arena.push({side.todo->symbol, next, -1, nullptr, at + 1}) : next;
            if (!side.article) return {{first, {after}}};
            const std::string joint = (starts_with_vowel(first) ? "n " : " ") + std::string(1, first);
            return {{joint[0], {arena.push({arena.text(joint.substr(1)), after})}}};
        }
        for (const Template* t : templates(s))
            for (auto& step : steps({arena.push(*t, next), side.article, side.capital})) all.push_back(step);
        return all;
    }
    static bool same(const Symbol& a, const Symbol& b) {
        return a.kind != Symbol::text && a.kind == b.kind && a.rule == b.rule && a.column == b.column &&
               a.variable == b.variable && a.article == b.article && a.capital == b.capital;
    }
    // `words`: what follows an ended side is not a letter, so "sea" cannot be mistaken for the start of "seal".
    bool clash(Side a, Side b, bool words, char last = 0) {
        if (a.todo && b.todo && a.article == b.article && a.capital == b.capital) {
            const Symbol &x = *a.todo->symbol, &y = *b.todo->symbol;
            if (a.todo == b.todo) return report();
            // The same choice on both sides is made in the same way, or the texts differ there (its own rule is
            // proved).
            if (same(x, y) && !may_be_empty(x.rule)) return clash({a.todo->next}, {b.todo->next}, words);
            if (x.kind != Symbol::text && y.kind != Symbol::text && x.rule == y.rule &&
                distinct.count({x.variable, y.variable})) {
                const Rule& rule = g.rules[x.rule];
                auto column = [&](const Symbol& s) {
                    return s.kind == Symbol::again ? *bound_columns(s.variable).begin() : s.column;
                };
                for (const Alternative& r : rule.alternatives)
                    for (const Alternative& q : rule.alternatives)
                        if (&r != &q &&
                            clash({arena.push(r.columns[column(x)], a.todo->next), x.article, x.capital},
                                  {arena.push(q.columns[column(y)], b.todo->next), y.article, y.capital}, words, last))
                            return true;
                return false;
            }
        }
        // A rule is opened before a remembered text is spelled out, so that {hero} meets {hero} as the same symbol.
        for (const bool first : {true, false}) {
            const Side& side = first ? a : b;
            if (!side.todo || side.todo->symbol->kind == Symbol::text || side.todo->symbol->kind == Symbol::again)
                continue;
            const Symbol& s = *side.todo->symbol;
            const std::string before = common;
            for (const Template* t : templates(s)) {
                const Side open{arena.push(*t, side.todo->next), side.article || s.article, side.capital || s.capital};
                common = before;
                if (first ? clash(open, b, words, last) : clash(a, open, words, last)) return true;
            }
            common = before;
            return false;
        }
        for (const auto& [c, rest_a] : steps(a))
            for (const auto& [d, rest_b] : steps(b)) {
                if (c == 0 || d == 0) {
                    if (!(words && is_word(last) && is_word(c ? c : d))) return report();
                    continue;
                }
                if (c != d) continue;
                common += c;
                if (clash(rest_a, rest_b, words, c)) return true;
                common.pop_back();
            }
        return false;
    }
    bool report() {
        if (!quiet) test::report(__FILE__, __LINE__, "ambiguous after \"" + common + "\"");
        return true;
    }
};

// Texts are followed by the symbols after them in a template, or by whatever follows the rule. Finds the rules whose
// text may be followed by a letter: those must be prefix codes without the help of word ends.
std::set<int> glued_rules(const Grammar& g) {
    Prover prover(g);
    std::set<int> glued;
    for (size_t before = ~size_t(0); before != glued.size();) {
        before = glued.size();
        for (size_t r = 0; r < g.rules.size(); r++)
            for (const Alternative& a : g.rules[r].alternatives)
                for (const Template& t : a.columns)
                    for (size_t i = 0; i < t.size(); i++) {
                        if (t[i].kind != Symbol::choose && t[i].kind != Symbol::recall) continue;
                        for (const auto& [c, rest] : prover.steps({prover.arena.push(t, nullptr, i + 1)}))
                            if (is_word(c) || (c == 0 && glued.count(static_cast<int>(r)))) glued.insert(t[i].rule);
                    }
    }
    return glued;
}

}  // namespace

// Every choice can be told from the text that follows: named rules are prefix codes in each column that is written when
// a row is chosen; choices in place and options are told apart by themselves together with the rest of their template.
TEST(choices_are_readable_from_the_left) {
    const Grammar& g = grammar();
    const std::set<int> glued = glued_rules(g);
    std::set<std::pair<int, int>> chosen;
    Prover prover(g);
    for (size_t r = 0; r < g.rules.size(); r++)
        for (const Alternative& a : g.rules[r].alternatives)
            for (const Template& t : a.columns)
                for (size_t i = 0; i < t.size(); i++) {
                    const Symbol& s = t[i];
                    if (s.kind != Symbol::choose) continue;
                    if (!g.rules[s.rule].name.empty()) {
                        chosen.insert({s.rule, s.column});
                        continue;
                    }
                    const Todo* rest = prover.arena.push(t, nullptr, i + 1);
                    const auto& choices = g.rules[s.rule].alternatives;
                    for (size_t x = 0; x < choices.size(); x++)
                        for (size_t y = 0; y < x; y++) {
                            prover.common.clear();
                            if (prover.clash({prover.arena.push(choices[x].columns[0], rest)},
                                             {prover.arena.push(choices[y].columns[0], rest)},
                                             !glued.count(static_cast<int>(r))))
                                test::report(__FILE__, __LINE__,
                                             format("  a choice in place in rule %s", g.rules[r].name.c_str()));
                        }
                }
    for (const auto& [r, column] : chosen) {
        const auto& choices = g.rules[r].alternatives;
        for (size_t x = 0; x < choices.size(); x++)
            for (size_t y = 0; y < x; y++) {
                prover.common.clear();
                if (prover.clash({prover.arena.push(choices[x].columns[column], nullptr)},
                                 {prover.arena.push(choices[y].columns[column], nullptr)}, !glued.count(r)))
                    test::report(
                        __FILE__, __LINE__,
                        format("  alternatives %zu and %zu of rule %s", y + 1, x + 1, g.rules[r].name.c_str()));
            }
    }
    CHECK(chosen.size() > 200);
}

// On every path, a variable is bound before it is recalled or excluded; every rule is reachable.
TEST(variables_are_bound_before_use) {
    const Grammar& g = grammar();
    // What is known on a path: bound variables, and which columns of a remembered row have been written. Those are what
    // lets one column of a row bind what another column of the same row recalls.
    using Known = std::set<std::pair<int, int>>;  // (variable, −1) or (variable, column)
    std::map<std::pair<const Symbol*, Known>, Known> visited;
    std::set<int> reached;
    std::function<Known(const Template&, Known, const std::string&)> follow;
    auto alternatives = [&](const Symbol& s, const Known& before) {
        const auto key = std::make_pair(&s, before);
        if (visited.count(key)) return visited[key];
        reached.insert(s.rule);
        Known after;
        bool first = true;
        for (const Alternative& a : g.rules[s.rule].alternatives) {
            Known known = before;
            if (s.kind == Symbol::recall)
                for (size_t c = 0; c < a.columns.size(); c++)
                    if (before.count({s.variable, static_cast<int>(c)}))
                        for (const Symbol& inner : a.columns[c])
                            if (inner.kind == Symbol::choose && inner.variable >= 0) known.insert({inner.variable, -1});
            known = follow(a.columns[s.column], known, g.rules[s.rule].name);
            Known both;
            std::set_intersection(known.begin(), known.end(), after.begin(), after.end(),
                                  std::inserter(both, both.end()));
            after = first ? known : both;
            first = false;
        }
        return visited[key] = after;
    };
    follow = [&](const Template& t, Known known, const std::string& where) {
        auto need = [&](int v) {
            if (!known.count({v, -1}))
                test::report(__FILE__, __LINE__, g.variables[v] + " may be unbound in rule " + where);
        };
        for (const Symbol& s : t) {
            if (s.kind == Symbol::text) continue;
            if (s.kind != Symbol::choose) need(s.variable);
            for (int other : s.others) {
                need(other);
                CHECK(g.variable_rules[other] == s.rule);
            }
            if (s.kind != Symbol::again) known = alternatives(s, known);
            if (s.variable >= 0) known.insert({s.variable, -1}), known.insert({s.variable, s.column});
        }
        return known;
    };
    Symbol root{Symbol::choose, ""};
    root.rule = g.rule("story");
    follow({root}, {}, "");
    for (size_t r = 0; r < g.rules.size(); r++)
        if (!reached.count(static_cast<int>(r))) test::report(__FILE__, __LINE__, "unused rule " + g.rules[r].name);
}

TEST(one_derivation_and_its_nats) {
    const int root = grammar().rule("story");
    for (uint64_t i = 0; i < 2000; i++) {
        const Story story = write_story(1, i);
        const Scorer scorer(grammar(), root, story.text);
        CHECK(scorer.derivations == 1);
        CHECK_NEAR(scorer.nats, story.nats, 1e-9);
    }
    const std::string text = write_story(1, 0).text;  // the scorer can say no
    CHECK(Scorer(grammar(), root, text + " ").derivations == 0);
    CHECK(Scorer(grammar(), root, text.substr(0, text.size() - 1)).derivations == 0);
}

// The checks themselves: they find what is wrong in grammars that are.
TEST(checks_find_ambiguity) {
    const Grammar twice("@rule s\n1 a {x}\n1 an apple\n@list x\napple, pear\n");
    CHECK(Scorer(twice, twice.rule("s"), "an apple").derivations == 2);
    CHECK(Scorer(twice, twice.rule("s"), "a pear").derivations == 1);
    Prover prover(twice);
    prover.quiet = true;
    const auto& s = twice.rules[twice.rule("s")].alternatives;
    CHECK(prover.clash({prover.arena.push(s[0].columns[0], nullptr)}, {prover.arena.push(s[1].columns[0], nullptr)},
                       true));
    CHECK_ERROR(Grammar("@rule s\n1 {nothing}\n"), "no rule nothing");
    CHECK_ERROR(Grammar("@rule s\n1 (a|b\n"), "no closing");
    CHECK_ERROR(Grammar("@table t: a, b\nx | y | z\n"), "number of columns");
    CHECK_ERROR(Grammar("@list x\na, b\n@list x\nc\n"), "second definition");
}

// ================================================================ The entropy of the grammar

namespace {
// E[−log p] by recursion over the choices, exactly. Where nothing later depends on the row that is chosen, expectations
// add. Rows whose columns hold choices of their own are followed one by one.
struct Entropy {
    const Grammar& g;
    Arena arena;
    std::map<std::pair<int, int>, double> known;
    std::map<std::pair<int, int>, bool> followed_inside;
    using Rows = std::map<int, const Alternative*>;

    bool followed(int variable) {  // some column that is recalled holds choices
        for (const Rule& rule : g.rules)
            for (const Alternative& a : rule.alternatives)
                for (const Template& t : a.columns)
                    for (const Symbol& s : t)
                        if (s.kind == Symbol::recall && s.variable == variable)
                            for (const Alternative& row : g.rules[s.rule].alternatives)
                                for (const Symbol& inner : row.columns[s.column])
                                    if (inner.kind != Symbol::text) return true;
        return false;
    }
    std::vector<bool> is_followed;
    explicit Entropy(const Grammar& g) : g(g) {
        for (size_t v = 0; v < g.variables.size(); v++) is_followed.push_back(followed(static_cast<int>(v)));
    }
    bool depends(const Symbol& s) {  // binds or recalls a followed variable, itself or inside
        if (s.kind == Symbol::text || s.kind == Symbol::again) return false;
        if (s.variable >= 0 && is_followed[s.variable]) return true;
        if (s.kind == Symbol::recall) return false;
        const auto key = std::make_pair(s.rule, s.column);
        if (followed_inside.count(key)) return followed_inside[key];
        bool any = false;
        for (const Alternative& a : g.rules[s.rule].alternatives)
            for (const Symbol& inner : a.columns[s.column]) any |= depends(inner);
        return followed_inside[key] = any;
    }
    double own(const Symbol& s) {  // of a symbol that does not depend
        if (s.kind != Symbol::choose) return 0;
        const Rule& rule = g.rules[s.rule];
        const double n = static_cast<double>(rule.alternatives.size());
        if (!s.others.empty()) {  // rows equally likely (checked), so each is as likely as any other
            CHECK(rule.total == rule.alternatives.size());
            return std::log(n - static_cast<double>(s.others.size())) - std::log(n) + own_of(s.rule, s.column);
        }
        return own_of(s.rule, s.column);
    }
    double own_of(int r, int column) {
        if (known.count({r, column})) return known[{r, column}];
        double nats = 0;
        for (const Alternative& a : g.rules[r].alternatives) {
            const double p = static_cast<double>(a.weight) / static_cast<double>(g.rules[r].total);
            nats -= p * std::log(p);
            for (const Symbol& s : a.columns[column]) nats += p * own(s);
        }
        return known[{r, column}] = nats;
    }
    double expected(const Todo* todo, const Rows& rows) {
        double sum = 0;
        for (; todo; todo = todo->next) {
            const Symbol& s = *todo->symbol;
            if (!depends(s)) {
                sum += own(s);
                continue;
            }
            if (s.kind == Symbol::recall)
                return sum + expected(arena.push(rows.at(s.variable)->columns[s.column], todo->next), rows);
            std::vector<const Alternative*> open;
            double total = 0;
            for (const Alternative& a : g.rules[s.rule].alternatives) {
                bool excluded = false;
                for (int other : s.others) excluded |= rows.at(other) == &a;
                if (!excluded) open.push_back(&a), total += static_cast<double>(a.weight);
            }
            for (const Alternative* a : open) {
                const double p = static_cast<double>(a->weight) / total;
                Rows then = rows;
                if (s.variable >= 0 && is_followed[s.variable]) then[s.variable] = a;
                sum += p * (expected(arena.push(a->columns[s.column], todo->next), then) - std::log(p));
            }
            return sum;
        }
        return sum;
    }
};
}  // namespace

TEST(mean_nats_are_the_grammars_entropy) {
    Entropy entropy(grammar());
    Symbol root{Symbol::choose, ""};
    root.rule = grammar().rule("story");
    const double exact = entropy.expected(entropy.arena.push({root}, nullptr), {});
    const int n = 20000;
    double sum = 0, squares = 0, bytes = 0;
    for (int i = 0; i < n; i++) {
        const Story story = write_story(7, i);
        sum += story.nats;
        squares += story.nats * story.nats;
        bytes += static_cast<double>(story.text.size() + 1);
    }
    const double mean = sum / n, error = std::sqrt((squares / n - mean * mean) / n);
    std::printf("  entropy %.3f nats a story, sampled %.3f ± %.3f; %.4f nats per token, %.0f tokens a story\n", exact,
                mean, error, sum / bytes, bytes / n);
    CHECK(error < 1);
    CHECK_NEAR(mean, exact, 4 * error);
}

// ================================================================ The stories

namespace {
std::vector<std::string> words_of(const std::string& text) {
    std::vector<std::string> words;
    std::string word;
    for (char c : text + " ")
        if (is_word(c))
            word += c;
        else if (!word.empty())
            words.push_back(word), word.clear();
    return words;
}
}  // namespace

TEST(english_is_in_order) {
    const Grammar& g = grammar();
    std::map<std::string, char> gender;  // name → h(e) or s(he)
    for (const Alternative& a : g.rules[g.rule("person")].alternatives)
        gender[a.columns[0][0].literal] = a.columns[1][0].literal[0];
    // Words whose sound belies their first letter.
    const std::set<std::string> silent = {"hour",    "hourglass", "honest",  "heir", "one",     "once", "unicorn",
                                          "uniform", "useful",    "useless", "used", "ukulele", "ewe",  "euro"};
    int pronouns = 0;
    for (uint64_t i = 0; i < 4000; i++) {
        const std::string text = write_story(1, i).text;
        for (char c : text) CHECK((c >= ' ' && c <= '~') || c == '\n');
        for (const char* bad :
             {"{", "}", "|", "(", ")", "[", "]", "  ", " .", " ,", "..", ". a", ".\"\"", "%", "\n\n", " \n", "\n "})
            if (text.find(bad) != std::string::npos)
                test::report(__FILE__, __LINE__, format("\"%s\" in: %s", bad, text.c_str()));
        CHECK(text.size() >= 300 && text.size() <= 1600);
        CHECK(text.back() == '.' || text.back() == '"' || text.back() == '!' || text.back() == '?');
        CHECK(std::count(text.begin(), text.end(), '"') % 2 == 0);

        const std::vector<std::string> words = words_of(text);
        for (size_t w = 0; w + 1 < words.size(); w++) {
            const std::string &article = words[w], &noun = words[w + 1];
            const bool vowel = starts_with_vowel(noun[0]) != (silent.count(noun) > 0);
            if (((article == "a" || article == "A") && vowel) || ((article == "an" || article == "An") && !vowel))
                if (text.find(article + " " + noun) != std::string::npos)
                    test::report(__FILE__, __LINE__, article + " " + noun + " in: " + text);
        }
        // The first sentence names the hero alone, so a pronoun that opens the second one is the hero's.
        const std::string first = text.substr(0, text.find(". ")),
                          second = text.substr(std::min(text.size(), first.size() + 2));
        std::string name;
        for (const std::string& w : words_of(first))
            if (gender.count(w)) name = w;
        const bool he = second.rfind("He ", 0) == 0, she = second.rfind("She ", 0) == 0;
        if (name.empty() || !(he || she)) continue;
        CHECK(gender[name] == (he ? 'h' : 's'));
        pronouns++;
        // Said of the hero only: the noun, and what is his or hers.
        CHECK(first.find(he ? " girl" : " boy") == std::string::npos);
    }
    CHECK(pronouns > 1000);
}

TEST(stories_vary) {
    std::unordered_set<std::string> stories, first_sentences, words;
    for (uint64_t i = 0; i < 20000; i++) {
        const std::string text = write_story(1, i).text;
        stories.insert(text);
        first_sentences.insert(text.substr(0, text.find('.')));
        for (std::string& word : words_of(text)) {
            word[0] = static_cast<char>(std::tolower(word[0]));
            words.insert(word);
        }
    }
    std::printf("  of 20000 stories %zu are distinct; %zu first sentences, %zu words\n", stories.size(),
                first_sentences.size(), words.size());
    CHECK(stories.size() == 20000);
    CHECK(first_sentences.size() > 10000);
    CHECK(words.size() > 3000);
}

TEST(same_bytes_everywhere) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a of stories 0 … 999
    for (uint64_t i = 0; i < 1000; i++)
        for (unsigned char c : write_story(1, i).text + "\f") hash = (hash ^ c) * 0x100000001b3;
    if (hash != kStoriesHash)
        test::report(__FILE__, __LINE__,
                     format("hash of 1000 stories is 0x%016llx", static_cast<unsigned long long>(hash)));
    CHECK(write_story(1, 5).text == write_story(1, 5).text);
    CHECK(write_story(1, 5).text != write_story(1, 6).text);
    CHECK(write_story(1, 5).text != write_story(2, 5).text);
}

// ================================================================ The corpus on disk

namespace {
namespace fs = std::filesystem;

struct TemporaryDirectory {
    std::string path =
        (fs::temp_directory_path() / format("test_corpus.%d.%p", static_cast<int>(getpid()), static_cast<void*>(this)))
            .string();
    TemporaryDirectory() { fs::remove_all(path); }
    ~TemporaryDirectory() { fs::remove_all(path); }
};
// The tests below share one corpus; the first of them that runs writes it.
const std::string& shared_directory() {
    static const TemporaryDirectory dir;
    return dir.path;
}
std::string content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}
struct Shard {
    std::vector<std::string> documents;
    uint64_t tokens;
};
Shard read_shard(const std::string& path) {
    const std::string bytes = content(path);
    int32_t header[256];
    CHECK(bytes.size() > sizeof header);
    std::memcpy(header, bytes.data(), sizeof header);
    CHECK(header[0] == 20240520 && header[1] == 1);
    CHECK(bytes.size() == sizeof header + 2 * static_cast<size_t>(header[2]));
    Shard shard{{}, static_cast<uint64_t>(header[2])};
    for (size_t i = sizeof header; i + 1 < bytes.size(); i += 2) {
        uint16_t token;
        std::memcpy(&token, bytes.data() + i, 2);
        if (token == kEndOfText)
            shard.documents.emplace_back();
        else
            shard.documents.back() += static_cast<char>(token_to_byte(token));
    }
    return shard;
}
}  // namespace

TEST(two_processes_at_once) {
    const std::string dir = shared_directory();
    pid_t children[2];
    for (pid_t& child : children)
        if ((child = fork()) == 0) {
            execl("/proc/self/exe", "test_corpus", "--write", dir.c_str(), nullptr);
            _exit(9);
        }
    for (pid_t child : children) {
        int status = -1;
        waitpid(child, &status, 0);
        CHECK(status == 0);
    }
    const auto time = fs::last_write_time(dir + "/train.bin");
    builtin_corpus(dir, true);
    CHECK(fs::last_write_time(dir + "/train.bin") == time);  // whole, so not written anew
}

TEST(shards_hold_the_stories) {
    const Corpus corpus = builtin_corpus(shared_directory());
    const Shard train = read_shard(corpus.train_path), val = read_shard(corpus.val_path);
    CHECK(train.tokens == corpus.train_tokens && train.tokens >= 30000000);
    CHECK(val.tokens == corpus.val_tokens && val.tokens >= 1000000);
    std::printf("  train %llu tokens, %.4f nats per token; val %llu tokens, %.4f\n",
                static_cast<unsigned long long>(train.tokens), corpus.train_nats,
                static_cast<unsigned long long>(val.tokens), corpus.val_nats);
    // Story numbers: validation from 0, then training; none is in both, and the floor counts every nat once.
    double nats = 0;
    for (size_t i = 0; i < val.documents.size(); i++) {
        const Story story = write_story(1, i);
        CHECK(val.documents[i] == story.text);
        nats += story.nats;
    }
    CHECK_NEAR(corpus.val_nats, nats / static_cast<double>(val.tokens), 1e-12);
    for (size_t i = 0; i < train.documents.size(); i += 997)
        CHECK(train.documents[i] == write_story(1, val.documents.size() + i).text);
    CHECK(train.documents.back() == write_story(1, val.documents.size() + train.documents.size() - 1).text);
    CHECK_NEAR(corpus.train_nats, corpus.val_nats, 0.01);
    const std::unordered_set<std::string> seen(train.documents.begin(), train.documents.end());
    CHECK(seen.size() == train.documents.size());
    for (const std::string& document : val.documents) CHECK(!seen.count(document));
}

TEST(cache_is_reused_or_written_anew) {
    const std::string& dir = shared_directory();
    const Corpus first = builtin_corpus(dir, true);
    const std::string val = content(first.val_path), about = content(dir + "/corpus.txt");
    const auto time = fs::last_write_time(first.train_path);
    const Corpus again = builtin_corpus(dir, true);
    CHECK(fs::last_write_time(first.train_path) == time);
    CHECK(again.train_tokens == first.train_tokens && again.val_tokens == first.val_tokens);
    CHECK(again.train_nats == first.train_nats && again.val_nats == first.val_nats);

    auto spoil = [&](const std::string& path, const std::string& with) {
        std::ofstream(path, std::ios::binary) << with;
        builtin_corpus(dir, true);
        CHECK(content(first.val_path) == val);
        CHECK(content(dir + "/corpus.txt") == about);
    };
    std::string foreign = val;
    foreign[foreign.size() / 2] ^= 1;
    spoil(first.val_path, val.substr(0, val.size() - 2));                          // truncated
    spoil(first.val_path, foreign);                                                // the right size, other bytes
    spoil(dir + "/corpus.txt", "version 0\n" + about.substr(about.find("seed")));  // another version
    for (const auto& entry : fs::directory_iterator(dir))
        CHECK(entry.path().filename().string().find("tmp") == std::string::npos);
}

TEST(unwritable_directory) {
    const TemporaryDirectory dir;
    fs::create_directories(dir.path);
    std::ofstream(dir.path + "/file") << "in the way";
    CHECK_ERROR(builtin_corpus(dir.path + "/file/corpus", true), "cannot write the built-in corpus");
    CHECK_ERROR(builtin_corpus(dir.path + "/file/corpus", true), "your own data");
    CHECK_ERROR(builtin_corpus("/proc/nowhere", true), "/proc/nowhere");
    if (geteuid() != 0) {
        fs::permissions(dir.path, fs::perms::owner_read | fs::perms::owner_exec);
        CHECK_ERROR(builtin_corpus(dir.path, true), "cannot write the built-in corpus");
        fs::permissions(dir.path, fs::perms::owner_all);
    }
}

int main(int argc, char** argv) {
    if (argc == 3 && std::string(argv[1]) == "--write") return builtin_corpus(argv[2], true).val_tokens == 0;
    return test::main(argc, argv);
}
