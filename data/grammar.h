// A stochastic grammar: text whose every choice has a known probability. The notation, line by
// line:
//
//   # a comment                     A line that starts with blanks continues the one before.
//   @list fruit                     Items separated by commas, equally likely.
//   apple, pear, plum
//   @rule greeting                  Alternatives, one a line, each after its weight.
//   3 "Good day," said {hero}.
//   1 {Hero.he} only nodded.
//   @table person: name, he, him    Rows, equally likely; columns are separated by " | ", and " / "
//   Ann / Eve | she | her           in the first column stands for several rows that share the
//   Tom | he | him                  other columns.
//
// and inside an alternative:
//
//   {fruit}                a choice from that rule. A capital, {Fruit}, capitalises what it writes.
//   {hero:person}          the same, and the row is remembered as hero. {x:table.column} writes
//                          another column.
//   {hero}                 that same text again: no choice.
//   {hero.he}              column "he" of the remembered row. A column is a template and may hold
//                          choices of its own.
//   {friend:person!hero}   a choice among the other rows.
//   (one|two)              a choice among equally likely templates written in place.
//   [30% text ]            text with that probability, else nothing.
//   a {fruit}              "an" where what follows starts with a vowel letter. It is not to be an
//                          option.
//   ¶                      (with the blanks around it) a line break.
//
// Weights are integers and choices are made in integers: the same seed writes the same bytes on
// every machine.
//
// A grammar is unambiguous if every rule is a prefix code: no text of one alternative begins with a
// text of another. A letter after the end of a word counts as a difference, so "sea" and "seal"
// differ, but "red" and "red clay" do not. Then a reader who comes from the left, and knows the
// rows remembered so far, knows each choice. A text shows its own end and has one derivation, and
// its probability is the product of its choices. dev/test/test_corpus.cpp finds the derivations of
// all validation stories, one each.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

struct Symbol;
using Template = std::vector<Symbol>;

struct Symbol {
    enum Kind {
        text,    // literally
        choose,  // from `rule`, writing `column`; remembered in `variable` unless that is −1
        again,   // what `variable` wrote when it was chosen
        recall,  // `column` of the row that `variable` remembers
    } kind;
    std::string literal = {};
    int rule = -1, column = 0, variable = -1;
    std::vector<int> others = {};  // variables whose rows are not to be chosen
    bool capital = false;          // the first letter
    bool article = false;          // the literal before ends in "a": write "n " or " " first
};
struct Alternative {
    uint64_t weight;
    std::vector<Template> columns;
};
struct Rule {
    std::string name;                  // "" if written in place
    std::vector<std::string> columns;  // their names; {""} if there is one only
    std::vector<Alternative> alternatives;
};
struct Variable {
    std::string name;
    int rule;  // of which it remembers a row
};
struct Grammar {
    std::vector<Rule> rules;
    std::vector<Variable> variables;
    int rule(const std::string& name) const;  // −1 if there is none

    explicit Grammar(const std::string& source);  // throws Error: line, what

    // Writes an alternative of `rule` with random stream (seed, index).
    std::string write(int rule, uint64_t seed, uint64_t index) const;
};
